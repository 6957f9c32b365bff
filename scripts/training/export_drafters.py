"""Write trained drafters as GGUF files, matrices as Q8_0.

    python export_drafters.py MODEL.gguf TRAINED_DIR MTP.gguf DFLASH.gguf

TRAINED_DIR is train_drafters.py's output folder. MTP.gguf holds only the block and the keys that
tell whether it fits; merge_mtp.py puts it into a copy of the model. DFLASH.gguf is a draft model of
its own with DSpark's two heads, which shares the target's embedding and head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import drafters
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from merge_mtp import ARCH, copy_fields, finish, value
from modelgen.drafter import draft_keys
from modelgen.gguf_write import add_key
from safetensors.numpy import load_file

DESCRIPTION = "trained on the model's own features and text; see scripts/training of moegraph"


def add_tensor(writer: gguf.GGUFWriter, name: str, x: np.ndarray) -> None:
    """Add a matrix as Q8_0; vectors, routers and tiny matrices as F32."""
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim == 1 or "gate_inp" in name or x.shape[0] == 1:
        writer.add_tensor(name, x)
    else:
        quantized = gguf.quants.quantize(x, Type.Q8_0)
        writer.add_tensor(name, quantized, raw_dtype=Type.Q8_0)


def describe(writer: gguf.GGUFWriter, name: str) -> None:
    """Write the general keys."""
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def write_mtp(reader: gguf.GGUFReader, trained: Path, out: Path) -> None:
    """Write the MTP block with the keys of the model that it makes."""
    writer = gguf.GGUFWriter(str(out), ARCH)
    describe(writer, f"MTP block for {value(reader, 'general.name')}")
    own = {f"{ARCH}.block_count", f"{ARCH}.nextn_predict_layers"}
    copy_fields(reader, writer, f"{ARCH}.", own)
    n_layer = value(reader, f"{ARCH}.block_count")
    writer.add_uint32(f"{ARCH}.block_count", n_layer + 1)
    writer.add_uint32(f"{ARCH}.nextn_predict_layers", 1)
    for name, x in load_file(trained / "mtp.safetensors").items():
        add_tensor(writer, name, x)
    finish(writer, out)


def write_dflash(reader: gguf.GGUFReader, trained: Path, out: Path) -> None:
    """Write the DFlash drafter with DSpark's heads."""
    writer = gguf.GGUFWriter(str(out), "dflash")
    describe(writer, f"DSpark drafter for {value(reader, 'general.name')}")
    for key, found in draft_keys(drafters.SHAPE).items():
        add_key(writer, key, found)
    mask = "tokenizer.ggml.mask_token_id"
    copy_fields(reader, writer, "tokenizer.", {mask, "tokenizer.chat_template"})
    writer.add_mask_token_id(drafters.SHAPE.mask_id)
    for name, x in load_file(trained / "dflash.safetensors").items():
        add_tensor(writer, name, x)
    finish(writer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trained", type=Path)
    parser.add_argument("mtp", type=Path)
    parser.add_argument("dflash", type=Path)
    args = parser.parse_args()
    reader = gguf.GGUFReader(str(args.model))
    write_mtp(reader, args.trained, args.mtp)
    write_dflash(reader, args.trained, args.dflash)


if __name__ == "__main__":
    main()
