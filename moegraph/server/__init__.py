"""The HTTP server: requests of OpenAI's and Anthropic's clients, and what operates it."""
