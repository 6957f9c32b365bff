"""Routed experts: where their bytes are on the device and how often each was chosen."""
