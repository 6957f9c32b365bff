"""ggml from Python: the only room that touches the native module.

lib loads the libraries and checks that they are the patched ones; handles own native objects;
device is one place that computes; ops builds graph nodes with their shapes checked first. Shapes
are in ggml order everywhere (ne0, the contiguous one, first): the reverse of numpy's.
"""
