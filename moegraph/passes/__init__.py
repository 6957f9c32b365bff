"""Passes over the sequences of a model, prompts, what sequences hold, and what is kept of it."""
