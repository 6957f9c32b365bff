"""Anthropic's Messages interface: blocks to messages, and parts of answers to blocks and events."""
