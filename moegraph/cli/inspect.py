"""`moegraph inspect`: what a model file holds, and what of it fits into so much memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..config import KV_TYPES
from ..errors import ModelFileError, RequestError
from ..units import MiB, format_bytes, format_count, parse_bytes
from . import options, ui

if TYPE_CHECKING:
    from ..modelfile import ModelFile, TensorInfo
    from ..modelfile.check import BadTensor
    from ..modelfile.summary import Fit, ModelSummary

# Compute buffers, the driver's context and alignment: what a device holds besides the model.
SCRATCH_BYTES = 512 * MiB
_MAX_VALUE_CHARS = 72
_MAX_LISTED = 8


@click.command(short_help="Show what a model file holds and what fits.")
@click.argument("target")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--vram", multiple=True, metavar="SIZE",
    help="Show what fits into this much device memory, in GiB or as 8GiB, 512MiB; repeatable.",
)  # fmt: skip
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.INT,
    default=4096,
    show_default=True,
    metavar="N",
    help="Context that must fit as well; 0 takes the model's own.",
)
@click.option(
    "-ctk",
    "--cache-type-k",
    "type_k",
    type=click.Choice(KV_TYPES),
    default="f16",
    show_default=True,
    help="Type of the K cache.",
)
@click.option(
    "-ctv",
    "--cache-type-v",
    "type_v",
    type=click.Choice(KV_TYPES),
    default="f16",
    show_default=True,
    help="Type of the V cache.",
)
@click.option(
    "--check",
    "with_check",
    is_flag=True,
    help="Read all weights and look for NaN and infinity, as in a damaged file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    target: str, with_tensors: bool, vram: tuple[str, ...], n_ctx: int, type_k: str, type_v: str,
    with_check: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show metadata, sizes and experts of the model TARGET; its weights are not loaded.

    \b
    Examples:
      moegraph inspect tiny
      moegraph inspect model.gguf --vram 8 --vram 12 -c 32768 -ctk q8_0 -ctv q8_0
      moegraph inspect model.gguf --tensors --json | jq .layers
      moegraph inspect model.gguf --check
    """
    from ..modelfile.summary import fit, summarize

    budgets = [parse_bytes(size, unit="g") for size in vram]
    if not 0 <= n_ctx <= 1 << 22:
        raise RequestError(f"n_ctx is {n_ctx} (-c/--ctx-size); allowed: 0 to {1 << 22}")
    with options.open_header(target) as model:
        summary = summarize(model.hparams, model.tensors)
        fits = [
            fit(
                summary, model.hparams, budget, n_ctx=n_ctx, scratch_bytes=SCRATCH_BYTES,
                type_k=type_k, type_v=type_v,
            )
            for budget in budgets
        ]  # fmt: skip
        bad = _check(model) if with_check else None
        if as_json:
            report = _report(model, summary, fits, with_tensors)
            if bad is not None:
                report["nonfinite"] = [dataclasses.asdict(tensor) for tensor in bad]
            click.echo(json.dumps(report, ensure_ascii=False, allow_nan=False))
        else:
            _show(model, summary, fits, with_tensors)
            if bad is not None:
                _show_check(bad, len(model.tensors))
        if bad:
            raise ModelFileError(
                f"{model.path}: {len(bad)} of {len(model.tensors)} tensors hold NaN or infinity, "
                f"the first is {bad[0].name}; the file is damaged, get it again"
            )


def _check(model: ModelFile) -> list[BadTensor]:
    from ..modelfile.check import find_nonfinite

    with ui.Bars() as bars:
        return find_nonfinite(model, lambda done, total: bars("check", done, total))


def _show_check(bad: list[BadTensor], n_tensors: int) -> None:
    click.echo()
    ui.heading("Check")
    if not bad:
        ui.table([("weights", f"no NaN and no infinity in {n_tensors} tensors")])
        return
    ui.table(
        [(t.name, t.type, f"{t.n_bad}", f"{t.n_blocks}", f"{t.first}") for t in bad],
        ("tensor", "type", "bad blocks", "of", "first"),
    )


def _report(
    model: ModelFile, summary: ModelSummary, fits: list[Fit], with_tensors: bool
) -> dict[str, Any]:
    layers = [
        {**dataclasses.asdict(layer), "expert_types": dict(layer.expert_types)}
        for layer in summary.layers
    ]
    report = {
        "paths": [str(path) for path in model.paths],
        "n_bytes": model.n_bytes,
        "warnings": list(model.warnings),
        "hparams": dataclasses.asdict(model.hparams),
        "n_params": summary.n_params,
        "active_params": summary.active_params,
        "dense_bytes": summary.dense_bytes,
        "expert_bytes": summary.expert_bytes,
        "unused_bytes": summary.unused_bytes,
        "types": [dataclasses.asdict(total) for total in summary.by_type],
        "layers": layers,
        "fits": [dataclasses.asdict(entry) for entry in fits],
        "metadata": {key: _plain(value) for key, value in model.kv.items()},
    }
    if with_tensors:
        report["tensors"] = [_tensor(info) for info in model.tensors.values()]
    return report


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.type.name,
        "ne": list(info.ne[: info.n_dims]),
        "n_bytes": info.nbytes,
        "part": info.part,
        "offset": info.offset,
    }


def _plain(value: Any) -> Any:
    """Return a metadata value for JSON: long arrays by their length, odd floats as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (bool, int, float, str)):
        return value
    if len(value) > _MAX_LISTED:
        kind = value.dtype.name if isinstance(value, np.ndarray) else "string"
        return {"array": kind, "length": len(value)}
    return [_plain(entry.item() if isinstance(entry, np.generic) else entry) for entry in value]


def _show(model: ModelFile, summary: ModelSummary, fits: list[Fit], with_tensors: bool) -> None:
    ui.heading("Metadata")
    ui.table((key, _brief(value)) for key, value in model.kv.items())
    click.echo()
    ui.heading("Model")
    ui.table(_facts(model, summary))
    click.echo()
    ui.heading("Types")
    ui.table(
        [
            (total.type, total.n_tensors, format_count(total.n_params), format_bytes(total.n_bytes))
            for total in summary.by_type
        ],
        ("type", "tensors", "parameters", "size"),
    )
    click.echo()
    ui.heading("Layers")
    ui.table(_layer_rows(summary), ("layer", "kind", "dense", "experts", "one expert", "types"))
    if with_tensors:
        click.echo()
        ui.heading("Tensors")
        ui.table(
            [
                (info.name, info.type.name, list(info.ne[: info.n_dims]), format_bytes(info.nbytes))
                for info in model.tensors.values()
            ],
            ("name", "type", "shape", "size"),
        )
    for entry in fits:
        click.echo()
        ui.heading(f"In {format_bytes(entry.budget_bytes)}, {entry.n_ctx} positions")
        ui.table(_fit_rows(entry))
    for warning in model.warnings:
        ui.note(f"warning: {warning}")


def _brief(value: Any) -> str:
    """Return a metadata value in one short piece."""
    plain = _plain(value)
    if isinstance(plain, Mapping):
        return f"{plain['length']} x {plain['array']}"
    text = json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else str(plain)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _facts(model: ModelFile, summary: ModelSummary) -> list[tuple[str, str]]:
    hp = model.hparams
    n_parts = len(model.paths)
    return [
        ("file", f"{model.path}" + (f" and {n_parts - 1} more" if n_parts > 1 else "")),
        ("size", format_bytes(model.n_bytes)),
        (
            "parameters",
            f"{format_count(summary.n_params)}, {format_count(summary.active_params)} a token",
        ),
        (
            "layers",
            f"{hp.n_layer}: {hp.n_layer_recurrent} DeltaNet, "
            f"{hp.n_layer - hp.n_layer_recurrent} attention"
            + (f"; {hp.n_layer_nextn} for prediction, not run" if hp.n_layer_nextn else ""),
        ),
        ("experts", f"{hp.n_expert} a layer, {hp.n_expert_used} a token, and one shared"),
        ("context", f"{hp.n_ctx_train} positions in training"),
        ("vocabulary", f"{hp.n_vocab} tokens"),
        (
            "dense",
            f"{format_bytes(summary.dense_bytes)}: all that runs for every token",
        ),
        ("routed experts", format_bytes(summary.expert_bytes)),
    ]


def _layer_rows(summary: ModelSummary) -> list[tuple[object, ...]]:
    return [
        (
            layer.il,
            "DeltaNet" if layer.recurrent else "attention",
            format_bytes(layer.dense_bytes),
            format_bytes(layer.expert_bytes),
            format_bytes(layer.bytes_per_expert),
            " ".join(f"{name.removeprefix('ffn_')}:{kind}" for name, kind in layer.expert_types),
        )
        for layer in summary.layers
    ]


def _fit_rows(entry: Fit) -> list[tuple[str, str]]:
    rows = [
        ("dense weights", format_bytes(entry.dense_bytes)),
        ("KV cache", format_bytes(entry.kv_bytes)),
        ("recurrent state", format_bytes(entry.state_bytes)),
        ("compute and driver", format_bytes(entry.scratch_bytes)),
    ]
    if entry.shortfall_bytes:
        rows.append(("short of", format_bytes(entry.shortfall_bytes)))
        return rows
    rows.append(("left for experts", format_bytes(entry.free_bytes)))
    if entry.everything_fits:
        rows.append(("fits", "everything"))
    else:
        rows.append(("whole layers", f"{entry.n_layers}"))
        rows.append((
            "single experts",
            f"{entry.n_slots} of {entry.n_experts_total} ({100 * entry.slot_share:.0f} %)",
        ))  # fmt: skip
    return rows
