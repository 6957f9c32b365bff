"""Put an MTP block into a copy of the model for which it was trained.

    python merge_mtp.py MODEL.gguf MTP.gguf OUT.gguf

The result is the model with one more block and `nextn_predict_layers` 1. Programs that do not draft
ignore the block and give the same results as with MODEL.gguf.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf

ARCH = "qwen35moe"
COUNT, NEXTN = f"{ARCH}.block_count", f"{ARCH}.nextn_predict_layers"


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


def check(model: gguf.GGUFReader, block: gguf.GGUFReader) -> None:
    """Raise unless the block was made for a model of this shape that has none."""
    n_layer, own = value(model, COUNT), (COUNT, NEXTN)
    if model.get_field(NEXTN) is not None and value(model, NEXTN):
        raise SystemExit("the model already has an MTP block")
    if value(block, COUNT) != n_layer + 1 or value(block, NEXTN) != 1:
        raise SystemExit(f"the block is not for a model of {n_layer} layers")
    for key in model.fields:
        if key.startswith(f"{ARCH}.") and key not in own and value(block, key) != value(model, key):
            raise SystemExit(f"model and block differ in {key}")


def merge(model: Path, block: Path, out: Path) -> None:
    """Write the merged file; tensors are copied byte by byte."""
    readers = [gguf.GGUFReader(str(model)), gguf.GGUFReader(str(block))]
    check(*readers)
    writer = gguf.GGUFWriter(str(out), ARCH)
    for prefix in ("general.", f"{ARCH}.", "tokenizer."):
        copy_fields(readers[0], writer, prefix, {"general.architecture", COUNT, NEXTN})
    writer.add_uint32(COUNT, value(readers[1], COUNT))
    writer.add_uint32(NEXTN, 1)
    for reader in readers:
        for t in reader.tensors:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    finish(writer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("block", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    merge(args.model, args.block, args.out)


if __name__ == "__main__":
    main()
