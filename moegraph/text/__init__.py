"""Text in and out: tokenizer, decoding in pieces, stop strings, chat templates."""
