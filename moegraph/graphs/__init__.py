"""Graph builders, one file for each block; nodes have the names that llama.cpp's cb() gives them.

A builder is pure: it takes tensors, appends nodes and returns tensors. Shapes are in ggml order.
A pass has n_tokens = n_seq_tokens * n_seqs rows; the rows of one sequence are consecutive.
"""
