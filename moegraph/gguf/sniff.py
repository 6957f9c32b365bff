"""Describe a file that is not little-endian GGUF, and say what to do about it."""

from __future__ import annotations

MAGIC = b"GGUF"

_LOOKS = (
    (b"FUGG", "a byte-swapped GGUF file; convert it again for a little-endian machine"),
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch checkpoint; convert it to GGUF"),
    (b"\x80\x02", "a pickle, perhaps a PyTorch checkpoint; convert it to GGUF"),
    (b"\x80\x04", "a pickle; convert the model to GGUF"),
    (b"\x1f\x8b", "gzip data; unpack it first"),
    (b"\xfd7zXZ", "xz data; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd data; unpack it first"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model; run 'git lfs pull'"),
    (b"lmgg", "an old GGML file; convert the original model to GGUF"),
    (b"fmgg", "an old GGMF file; convert the original model to GGUF"),
    (b"tjgg", "an old GGJT file; convert the original model to GGUF"),
    (b"algg", "a GGML adapter; moegraph runs whole models"),
    (b"\x7fELF", "a program"),
    (b"\x89HDF", "an HDF5 file; convert the model to GGUF"),
)


def describe_foreign(head: bytes) -> str:
    """Return what a file that starts with head looks like, with a remedy where there is one.

    head: the first bytes of the file; 64 are enough.
    """
    for magic, words in _LOOKS:
        if head.startswith(magic):
            return f"it looks like {words}"
    # safetensors: u64 length of a JSON object, then the object.
    if len(head) >= 10 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "it looks like a safetensors file; convert it to GGUF"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it looks like a web page; the download probably failed, fetch the file again"
    if text.startswith((b"{", b"[")):
        return "it looks like JSON, not a model file"
    if not any(head):
        return "it begins with zero bytes; the download probably failed"
    return f"it begins with {head[:4]!r} where b'GGUF' should be"
