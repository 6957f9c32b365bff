"""`moegraph inspect`: the contents of a model file, and how much of it fits into memory."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..config import EngineConfig
from ..errors import ModelFileError, RequestError, UnsupportedModel
from ..gguf import open_gguf
from ..units import format_bytes, format_count
from . import models, options, ui
from .budget import Budget, Planner, budget_fields, memory_rows, resident_text, show_cards, sizes_of
from .models import target_argument

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..arch.base import Architecture
    from ..arch.summary import LayerSummary, ModelSummary, TypeTotal
    from ..gguf import GgufFile, TensorInfo
    from ..gguf.check import BadTensor

_MAX_VALUE_CHARS = 72
_MAX_LISTED = 8
_MAX_RUNS = 5
_TEMPLATE = "tokenizer.chat_template"


@click.command()
@target_argument
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--tensor", "globs", multiple=True, metavar="GLOB",
    help="List the tensors whose names match, such as 'blk.0.*'; repeatable.",
)  # fmt: skip
@click.option("--key", metavar="KEY", help="Print only the value of one metadata key, in full.")
@click.option("--template", "with_template", is_flag=True, help="Print only the chat template.")
@click.option(
    "--vram", multiple=True, metavar="SIZE",
    help="Show what fits into this much device memory, such as 8 (in GiB) or 512MiB, or into "
    "several cards, such as 8,12; repeatable.",
)  # fmt: skip
@options.engine_options(only=("n_ctx", "type_k", "type_v"))
@click.option(
    "--check", "with_check", is_flag=True,
    help="Read all weights and report NaN and infinity, which mean that the file is damaged.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    target: str, with_tensors: bool, globs: tuple[str, ...], key: str | None, with_template: bool,
    vram: tuple[str, ...], with_check: bool, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Show metadata, sizes and experts of the model TARGET, without loading its weights.

    If moegraph does not run the file's architecture, inspect shows only metadata, types and
    tensors. With --vram, the planner says what fits beside a KV cache of -c, -ctk and -ctv;
    `moegraph plan` gives more detail.

    \b
    Examples:
      moegraph inspect tiny
      moegraph inspect model.gguf --vram 8 --vram 12 -c 32768 -ctk q8_0 -ctv q8_0
      moegraph inspect model.gguf --tensor 'blk.0.*' --json | jq .tensors
      moegraph inspect model.gguf --key general.name
      moegraph inspect model.gguf --check
    """
    sizes, config = sizes_of(vram), options.build_config(given)
    if key is not None and with_template:
        raise click.UsageError("--key and --template each print one value; give one")
    wanted = _TEMPLATE if with_template else key
    if wanted is not None:
        with open_gguf(models.local_path(target)) as file:
            _print_value(file, wanted, as_json)
        return
    globs = globs or (("*",) if with_tensors else ())
    try:
        model = models.open_header(target)
    except UnsupportedModel as error:
        if sizes or with_check:
            raise
        with open_gguf(models.local_path(target)) as file:
            _show_foreign(file, globs, as_json, str(error))
        return
    with model:
        with ExitStack() as stack:
            planner = Planner(model, config, stack)
            budgets = [planner.budget(cards) for cards in sizes]
        _inspect(model, globs, budgets, config, with_check, as_json)


def _inspect(
    model: ModelFile, globs: Sequence[str], budgets: list[Budget], config: EngineConfig,
    with_check: bool, as_json: bool,
) -> None:  # fmt: skip
    from ..arch.summary import summarize
    from ..gguf.check import find_nonfinite

    summary = summarize(model.hparams, model.tensors)
    bad: list[BadTensor] | None = None
    if with_check:
        with ui.Bars() as bars:
            bad = find_nonfinite(model, lambda done, total: bars("check", done, total))
    if as_json:
        report = _report(model, summary, budgets, globs)
        if bad is not None:
            report["nonfinite"] = [dataclasses.asdict(tensor) for tensor in bad]
        _print_json(report)
    else:
        ui.heading("Model")
        ui.table([*_facts(model, summary), ("KV cache", _kv_text(model.hparams, config))])
        _show_metadata(model)
        _show_types(summary.by_type)
        ui.section("Layers")
        header = ("layers", "n", "kind", "dense", "experts", "one expert", "types")
        ui.table(_layer_rows(summary.layers), header)
        _show_tensors(model, globs)
        for budget in budgets:
            _show_budget(budget, config.ctx_within(model.hparams.n_ctx_train))
        for warning in model.warnings:
            ui.note(f"warning: {warning}")
        if bad is not None:
            _show_check(bad, len(model.tensors))
    if bad:
        raise ModelFileError(
            f"{model.path}: {len(bad)} of {len(model.tensors)} tensors hold NaN or infinity, "
            f"the first is {bad[0].name}; the file is damaged; download it again"
        )


def _print_value(file: GgufFile, key: str, as_json: bool) -> None:
    """Print one metadata value in full: a text as it is, anything else as JSON."""
    if key not in file.kv:
        near = difflib.get_close_matches(key, file.kv, 3)
        hint = f"close to it: {', '.join(near)}" if near else "`moegraph inspect TARGET` lists all"
        raise RequestError(f"{file.path}: there is no metadata key {key!r}; {hint}")
    value = file.kv[key]
    if isinstance(value, str) and not as_json:
        ui.write_text(value + ("" if value.endswith("\n") else "\n"))
        return
    listed = value if isinstance(value, (bool, int, float, str)) else [_scalar(v) for v in value]
    _print_json(_scalar(listed) if isinstance(listed, float) else listed)


def _print_json(value: Any) -> None:
    ui.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def _show_foreign(file: GgufFile, globs: Sequence[str], as_json: bool, reason: str) -> None:
    """Show what can be shown of a file that moegraph cannot run."""
    from ..arch.summary import types_of

    totals = types_of(file.tensors.values())
    if as_json:
        _print_json({
            **_file_fields(file), "unsupported": reason,
            "n_params": sum(total.n_params for total in totals),
            "types": [dataclasses.asdict(total) for total in totals],
            **_tensor_fields(file, globs),
        })  # fmt: skip
        return
    ui.heading("File")
    ui.table([
        ("file", _path_text(file)), ("size", format_bytes(file.n_bytes)),
        ("parameters", format_count(sum(total.n_params for total in totals))),
        ("tensors", f"{len(file.tensors):,}"),
    ])  # fmt: skip
    _show_metadata(file)
    _show_types(totals)
    _show_tensors(file, globs)
    ui.note(f"warning: {reason}")


def _show_check(bad: list[BadTensor], n_tensors: int) -> None:
    ui.section("Check")
    if not bad:
        ui.table([("weights", f"no NaN and no infinity in {n_tensors} tensors")])
        return
    ui.table(
        [(t.name, t.type, f"{t.n_bad:,}", f"{t.n_blocks:,}", f"{t.first:,}") for t in bad],
        ("tensor", "type", "bad blocks", "of", "first"),
    )


def _tensor_fields(file: GgufFile, globs: Sequence[str]) -> dict[str, Any]:
    tensors = [
        {
            "name": info.name, "type": info.type.name, "ne": list(info.ne[: info.n_dims]),
            "n_bytes": info.nbytes, "part": info.part, "offset": info.offset,
        }
        for info in _matching(file, globs)
    ]  # fmt: skip
    return {"tensors": tensors} if globs else {}


def _file_fields(file: GgufFile) -> dict[str, Any]:
    return {
        "paths": [str(path) for path in file.paths],
        "n_bytes": file.n_bytes,
        "warnings": list(file.warnings),
        "metadata": {key: _plain(value) for key, value in file.kv.items()},
    }


def _report(
    model: ModelFile, summary: ModelSummary, budgets: Sequence[Budget], globs: Sequence[str]
) -> dict[str, Any]:
    layers = [
        {**dataclasses.asdict(layer), "expert_types": dict(layer.expert_types)}
        for layer in summary.layers
    ]
    return {
        **_file_fields(model),
        "hparams": dataclasses.asdict(model.hparams),
        "n_params": summary.n_params,
        "n_active_params": summary.active_params,
        "dense_bytes": summary.dense_bytes,
        "expert_bytes": summary.expert_bytes,
        "unused_bytes": summary.unused_bytes,
        "types": [dataclasses.asdict(total) for total in summary.by_type],
        "layers": layers,
        "budgets": [budget_fields(budget) for budget in budgets],
        **_tensor_fields(model, globs),
    }


def _matching(file: GgufFile, globs: Sequence[str]) -> list[TensorInfo]:
    found = [
        info
        for info in file.tensors.values()
        if any(fnmatch.fnmatchcase(info.name, glob) for glob in globs)
    ]
    if globs and not found:
        raise RequestError(f"{file.path}: no tensor matches {' or '.join(map(repr, globs))}")
    return found


def _plain(value: Any) -> Any:
    """Return a metadata value for JSON: long arrays by length, NaN and infinity as text."""
    if isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if len(value) > _MAX_LISTED:
        kind = value.dtype.name if isinstance(value, np.ndarray) else "string"
        return {"array": kind, "length": len(value)}
    return [_scalar(entry) for entry in value]


def _scalar(value: Any) -> Any:
    """Return a scalar for JSON; NaN and infinity as text."""
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show_metadata(file: GgufFile) -> None:
    ui.section("Metadata")
    ui.table(
        ((key, _brief(value) + _meaning(key, value)) for key, value in file.kv.items()),
        is_text=True,
    )


def _show_types(totals: Iterable[TypeTotal]) -> None:
    ui.section("Types")
    ui.table(
        [
            (total.type, f"{total.n_tensors:,}", format_count(total.n_params),
             format_bytes(total.n_bytes))
            for total in totals
        ],
        ("type", "tensors", "parameters", "size"),
    )  # fmt: skip


def _show_tensors(file: GgufFile, globs: Sequence[str]) -> None:
    found = _matching(file, globs)
    if found:
        ui.section("Tensors")
        ui.table(
            [
                (info.name, info.type.name, list(info.ne[: info.n_dims]), format_bytes(info.nbytes))
                for info in found
            ],
            ("name", "type", "shape", "size"),
        )


def _show_budget(budget: Budget, n_ctx: int) -> None:
    what = resident_text(budget.plan) if budget.plan else "does not fit"
    ui.section(f"In {budget.title}, {n_ctx:,} positions: {what}")
    if budget.stages:
        show_cards(budget)
    ui.table(memory_rows(budget) or [(budget.refusal,)])


def _brief(value: Any) -> str:
    """Return a metadata value as a short text for the table."""
    plain = _plain(value)
    if isinstance(plain, Mapping):
        return f"{plain['length']:,} x {plain['array']}"
    if isinstance(plain, list):
        text = f"[{', '.join(_number_text(entry) for entry in plain)}]"
    else:
        text = _number_text(plain)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _number_text(value: Any) -> str:
    """Return a scalar as text: digits grouped, an F32 with the digits that an F32 has."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else f"{value}"
    with np.errstate(over="ignore"):
        as_f32 = np.float32(value)
    return str(as_f32) if float(as_f32) == value else repr(value)


def _meaning(key: str, value: Any) -> str:
    """Return the name of a file type in parentheses; '' for other keys."""
    from gguf.constants import LlamaFileType

    if key != "general.file_type" or value not in [kind.value for kind in LlamaFileType]:
        return ""
    return f" ({LlamaFileType(value).name.removeprefix('MOSTLY_').removeprefix('ALL_')})"


def _path_text(file: GgufFile) -> str:
    n_parts = len(file.paths)
    return f"{file.path}" + (f" and {n_parts - 1} more" if n_parts > 1 else "")


def _facts(model: ModelFile, summary: ModelSummary) -> list[tuple[str, str]]:
    hp, mixers = model.hparams, Counter(layer.mixer for layer in summary.layers)
    shared = ", and one shared" if hp.n_ff_shexp else ""
    n_routed = len(hp.routed_layers)
    routed = f", in {n_routed} of {hp.n_layer} layers" if n_routed < hp.n_layer else ""
    return [
        ("file", _path_text(model)),
        ("size", format_bytes(model.n_bytes)),
        (
            "parameters",
            f"{format_count(summary.n_params)}, {format_count(summary.active_params)} a token",
        ),
        (
            "layers",
            f"{hp.n_layer}: {', '.join(f'{n} {mixer}' for mixer, n in sorted(mixers.items()))}"
            + (f"; {hp.n_layer_nextn} for drafts (MTP)" if hp.n_layer_nextn else ""),
        ),
        ("experts", f"{hp.n_expert} a layer, {hp.n_expert_used} a token{shared}{routed}"),
        ("context", f"{hp.n_ctx_train:,} positions in training"),
        ("vocabulary", f"{hp.n_vocab:,} tokens"),
        ("dense", f"{format_bytes(summary.dense_bytes)}: all that runs for every token"),
        ("routed experts", format_bytes(summary.expert_bytes)),
    ]


def _kv_text(hp: Architecture, config: EngineConfig) -> str:
    """Return in words what a position takes in the KV caches, and in which layers."""
    from ..arch.summary import kv_bytes

    texts, layers = [], [hp.layer(il) for il in range(hp.n_layer)]
    for window in sorted({layer.window or 0 for layer in layers if layer.cached}):
        at = [il for il, one in enumerate(layers) if one.cached and (one.window or 0) == window]
        size = sum(kv_bytes(layers[il], config.type_k, config.type_v) for il in at)
        where = f" of a window of {window:,}" if window else ""
        texts.append(f"{format_bytes(size)} for each position{where}, in layers {_runs(at)}")
    return "; ".join(texts)


def _layer_rows(layers: Iterable[LayerSummary]) -> list[tuple[str, ...]]:
    """Return one row for each group of equal layers."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in layers:
        what = (
            layer.mixer, format_bytes(layer.dense_bytes),
            *(format_bytes(n) if n else ui.NONE
              for n in (layer.expert_bytes, layer.bytes_per_expert)),
            _types_text(layer.expert_types) or ui.NONE,
        )  # fmt: skip
        groups.setdefault(what, []).append(layer.il)
    return [(_runs(at), f"{len(at)}", *what) for what, at in groups.items()]


def _types_text(types: Sequence[tuple[str, str]]) -> str:
    """Return the types of expert tensors by type, as 'gate, up Q4_K; down Q6_K'."""
    by_type: dict[str, list[str]] = {}
    for name, kind in types:
        by_type.setdefault(kind, []).append(name.removeprefix("ffn_").removesuffix("_exps"))
    return "; ".join(f"{', '.join(names)} {kind}" for kind, names in by_type.items())


def _runs(numbers: Sequence[int]) -> str:
    """Return rising numbers as '0-2, 4-6, 9', without the middle if there are many runs."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > _MAX_RUNS:
        texts = [*texts[: _MAX_RUNS - 2], "...", texts[-1]]
    return ", ".join(texts)
