"""Parts of layers that several architectures share; what differs is an argument."""
