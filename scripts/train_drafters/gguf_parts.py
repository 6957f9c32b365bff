"""What reading and writing drafters' GGUF files has in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf

ARCH = "qwen35moe"


def copy_fields(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, prefix: str, skip: Iterable[str] = ()
) -> None:
    """Copy all keys that begin with prefix, except those to skip."""
    for key, field in reader.fields.items():
        if key.startswith(prefix) and key not in skip and field.types:
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """Return the value of a key that must be there."""
    field = reader.get_field(key)
    if field is None:
        raise SystemExit(f"a file has no key {key}")
    return field.contents()


def finish(writer: gguf.GGUFWriter, path: Path) -> None:
    """Write the file and say its size."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
