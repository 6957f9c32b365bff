"""Speed measurements in llama-bench's terms, so that rows can be compared."""
