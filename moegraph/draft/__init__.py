"""Drafting: what proposes tokens, the trees made of them, and which of them the target accepts."""
