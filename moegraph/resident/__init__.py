"""What lives on one device: weights, caches and states, expert slots; experts in host memory."""
