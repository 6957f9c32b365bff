"""The loop that answers requests: which work runs next, and what each request gets of it."""
