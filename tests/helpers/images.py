"""Pictures as files, whole and damaged."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np

# pictures of 16 x 16: JPEG, and GIF
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAKBueIx4ZKCMgoy0qqC+8P//8Nzc8P///////////////////////////////"
    "///////////////////////////wAALCAAQABABAREA/8QAFgABAQEAAAAAAAAAAAAAAAAAAgED/8QAGxAAAwACAwAAA"
    "AAAAAAAAAAAAAECERIDMbH/2gAIAQEAAD8AMo0ypnLJKDyVtWq6Xp//2Q=="
)
GIF = base64.b64decode(
    "R0lGODdhEAAQAIEAAODg4KOjo2RkZCIiIiwAAAAAEAAQAEAIWAAHCBQooKCAAAgDAFho8GBChQsBDBzY8GFEiQUtRpw4"
    "QMDEigkvdgSJUORIhyVNEtS4kGPBjyQhSiRo8KHMmTEv4qwZciPNjD1bUgSaUihNmypHsjR6MiAAOw=="
)

LIB = Path(__file__).resolve().parents[2] / "moegraph" / "lib"


def has_mtmd() -> bool:
    """Return whether this build can encode pictures."""
    return (LIB / "libmtmd.so").is_file()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bmp(width: int, height: int) -> bytes:
    """Return a picture of zeros without compression."""
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    pixels = bytes((3 * width + 3) // 4 * 4 * height)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + head + pixels


def hostile(n: int, seed: int = 0) -> list[bytes]:
    """Return n files that are no pictures, lie about their size, or are damaged."""
    rng = np.random.default_rng(seed)
    large = struct.pack(">IIBBBBB", 65000, 65000, 8, 2, 0, 0, 0)
    bomb = struct.pack(">IIBBBBB", 8000, 8000, 8, 6, 0, 0, 0)
    found = [
        b"", b"\0", b"RIFF\0\0\0\0WAVEfmt ", b"ID3" + bytes(100), b"fLaC" + bytes(40),
        b"RIFF\x10\0\0\0WEBPVP8 ", b"\0\0\0 ftypisom" + bytes(64), b"GIF89a" + b"\xff" * 200,
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", large) + chunk(b"IDAT", zlib.compress(bytes(9))),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bomb) + chunk(b"IDAT", zlib.compress(bytes(1 << 24))),
        bmp(3, 3)[:18] + b"\xff" * 40, b"#?RADIANCE\n\n-Y 9999999 +X 9999999\n" + bytes(9),
        b"8BPS\0\1" + b"\xff" * 60, b"P6 999999999 9 255 ", b"\xff\xd8\xff\xe0" + bytes(300),
        b"\x53\x80\xf6\x34" + bytes(100), b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ]  # fmt: skip
    whole = [png(40, 30), bmp(33, 20), JPEG, GIF]
    while len(found) < n:
        data = bytearray(whole[len(found) % len(whole)])
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        found.append(bytes(data[: int(rng.integers(8, len(data) + 1))]))
    return found[:n]
