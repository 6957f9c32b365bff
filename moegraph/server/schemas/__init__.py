"""What clients may send: one module for each kind of request."""
