"""ggml from Python: the only package that imports the native module.

lib loads the libraries and checks their patch set. handles owns native objects. device has streams
and memory. ops checks shapes and builds graph nodes. All shapes are in ggml order (ne0, the
contiguous extent, first): the reverse of numpy's.
"""
