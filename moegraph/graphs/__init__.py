"""Graph builders, one file a block, every node named as upstream's cb() names it.

A builder is pure: it takes tensors, appends nodes and returns tensors. Shapes are in ggml order.
n_seq_tokens counts rows of one sequence, n_tokens = n_seq_tokens * n_seqs rows of the pass; the
rows of a sequence are neighbours.
"""
