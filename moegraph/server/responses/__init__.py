"""OpenAI's Responses interface: items to messages, and parts of answers to items and events."""
