"""Conversations: messages, and the chat template that turns them into a prompt."""
