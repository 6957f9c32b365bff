#!/usr/bin/env python3
"""Compute the table from which `moegraph plan` without a model says what a machine can run.

Each model has the published shape that scripts/modelgen describes, in the types that files on
Hugging Face have about. Writes moegraph/placement/known.json; --check only compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _tools import ROOT

sys.path.insert(0, str(ROOT))

from modelgen.build import contents
from modelgen.gguf_write import write_gguf
from modelgen.presets import PRESETS, Preset

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.placement.footprint import needed_bytes, token_work

TABLE = ROOT / "moegraph" / "placement" / "known.json"
_OSS = PRESETS["gpt-oss-20b"]
_OSS_120 = Preset(replace(_OSS.shape, n_layer=36, n_expert=128), _OSS.mix, "")
# Models by how much they are used, most first: name, repository, preset.
MODELS: list[tuple[str, str, str | Preset]] = [
    ("Qwen3.6-35B-A3B", "unsloth/Qwen3.6-35B-A3B-GGUF", "35b-a3b"),
    ("Gemma-4-26B-A4B", "unsloth/gemma-4-26B-A4B-it-GGUF", "gemma-4-26b-a4b"),
    ("gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b"),
    ("Qwen3-Coder-30B-A3B", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", "30b-a3b"),
    ("GLM-4.7-Flash", "unsloth/GLM-4.7-Flash-GGUF", "glm-4.7-flash"),
    ("Qwen3-Next-80B-A3B", "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF", "80b-a3b"),
    ("GLM-4.5-Air", "unsloth/GLM-4.5-Air-GGUF", "glm-4.5-air"),
    ("gpt-oss-120b", "ggml-org/gpt-oss-120b-GGUF", _OSS_120),
    ("Qwen3.5-122B-A10B", "unsloth/Qwen3.5-122B-A10B-GGUF", "122b-a10b"),
]
# Of routed experts, where a row of `down` is whole blocks of 256, and where not.
MIXES = {
    "Q4_K_M": ("gate_up=Q4_K,down=Q5_K", "gate_up=Q4_K,down=Q5_0"),
    "Q3_K_M": ("gate_up=Q3_K,down=Q4_K", "gate_up=Q3_K,down=Q4_0"),
    "Q2_K": ("gate_up=Q2_K,down=Q3_K", "gate_up=Q2_K,down=Q4_0"),
}


def row(name: str, repo: str, quant: str, preset: Preset, mix: str, folder: Path) -> dict[str, Any]:
    """Return what the table says of a model in a quantization; runs of equal layers are counted."""
    keys, tensors = contents(preset.shape, mix)
    path = folder / "model.gguf"
    write_gguf(path, preset.shape.arch, keys, [t.entry() for t in tensors.values()])
    config = EngineConfig()
    with open_model(path) as model:
        need = needed_bytes(model, config, config.ctx_within(model.hparams.n_ctx_train))
        fields = {
            **vars(need),
            "slot_bytes": [[len(list(g)), n] for n, g in groupby(need.slot_bytes)],
        }
        return {
            "name": name, "repo": repo, "quant": quant, "n_bytes": model.n_bytes,
            "need": {key: value for key, value in fields.items() if value},
            "token": token_work(model),
        }  # fmt: skip


def table() -> str:
    """Return the text of the table."""
    rows = []
    with TemporaryDirectory() as folder:
        for name, repo, key in MODELS:
            preset = PRESETS[key] if isinstance(key, str) else key
            mixes = {
                quant: f"{preset.mix},{m[preset.shape.n_ff_exp % 256 > 0]}"
                for quant, m in MIXES.items()
            }
            if preset.shape.arch == "gpt-oss":  # is published in MXFP4 only
                mixes = {"MXFP4": preset.mix}
            rows += [row(name, repo, q, preset, mix, Path(folder)) for q, mix in mixes.items()]
    return "[\n" + ",\n".join(json.dumps(one) for one in rows) + "\n]\n"


def main() -> int:
    """Write the table, or compare it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    is_check, text = parser.parse_args().check, table()
    if not is_check:
        TABLE.write_text(text)
    elif TABLE.read_text() != text:
        print(f"{TABLE.name} is not up to date; run scripts/gen_known.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
