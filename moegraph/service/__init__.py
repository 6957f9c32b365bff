"""Answers many requests with one engine: which of them runs next, and what each gets."""
