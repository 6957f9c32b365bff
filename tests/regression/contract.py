"""How the CUDA contract is judged (docs/correctness.md): which numbers are held to upstream's own.

Nothing here knows of a device: two runs give rows of logits, and all the rest is arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from regression.compare import Array, Difference, first_differences, margins

# (kind of pass, KV type) -> logits [rows, n_vocab]. Kinds: "prompt", "single".
Rows = Mapping[tuple[str, str], Array]
Texts = Sequence[Sequence[int]]


def row_errors(ours: Array, theirs: Array) -> Array:
    """Return [rows, 2]: squared error and squared norm of each row; the error of NaN is inf."""
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes {ours.shape} and {theirs.shape} cannot be compared")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    error = ((a - b) ** 2).sum(-1)
    return np.stack([np.where(np.isfinite(error), error, np.inf), (b**2).sum(-1)], -1)


def _pooled(errors: Sequence[Array]) -> float:
    error, energy = np.concatenate(errors).sum(0)
    return float(error / energy)


def _relative(errors: Array) -> Array:
    return errors[:, 0] / errors[:, 1]


def _worst(errors: Mapping[tuple[str, str], Array]) -> tuple[float, str]:
    """Return the largest NMSE of a row, and which row that is."""
    key = max(errors, key=lambda k: float(_relative(errors[k]).max()))
    rows = _relative(errors[key])
    return float(rows.max()), f"{key[0]} row {int(rows.argmax())}, KV {key[1]}"


def judge_rows(ours: Rows, theirs: Rows, *others: Rows) -> list[Difference]:
    """Compare ours with `theirs`, upstream's; `others` are upstream's at other settings.

    Each number of ours is held to the largest that the others give. They may lack kinds of rows. A
    run that has f16 alone tells how much rounding matters, which quantized K and V make no smaller:
    the medians of all KV types are held to it.

    Single rows are judged apart from prompts. The median row of each KV type tells whether all
    rows are a little off, the NMSE of all rows of a kind whether some are far off, and the worst
    row whether one is. The last two are taken over all KV types: a router's choice that flips
    makes a row many times worse than the median, and a few rows hold too few flips to compare.
    """
    mine = {key: row_errors(ours[key], theirs[key]) for key in theirs}
    own = [{key: row_errors(rows[key], theirs[key]) for key in rows} for rows in others]
    found = []
    for key in theirs:
        median = float(np.median(_relative(mine[key])))
        like = dict.fromkeys([key, (key[0], "f16")])
        medians = [float(np.median(_relative(e[one]))) for e in own for one in like if one in e]
        found.append(Difference(median, max(medians), f"median {key[0]} row, KV {key[1]}"))
    for kind in dict.fromkeys(kind for kind, _ in theirs):
        parts = ([e[key] for key in e if key[0] == kind] for e in (mine, *own))
        pooled, *most = (_pooled(part) for part in parts if part)
        found.append(Difference(pooled, max(most), f"NMSE of all {kind} rows"))
    worst, where = _worst(mine)
    own_worst = max(_worst(e)[0] for e in own)
    return [*found, Difference(worst, own_worst, f"worst row ({where})")]


def parted_rows(ours: Array, theirs: Array, other: Array) -> list[dict[str, Any]]:
    """List the rows where the argmax of ours or of upstream's other setting is not upstream's.

    margin: upstream's largest logit less its second; nmse: of our row.
    """
    best, gap = theirs.argmax(-1), margins(theirs)
    error = _relative(row_errors(ours, theirs))
    mine, own = ours.argmax(-1), other.argmax(-1)
    return [
        {
            "row": int(i), "ours": int(mine[i]), "upstream": int(best[i]), "other": int(own[i]),
            "margin": float(gap[i]), "nmse": float(error[i]),
        }
        for i in np.flatnonzero((mine != best) | (own != best))
    ]  # fmt: skip


def parting_difference(
    ours: Sequence[Texts], theirs: Sequence[Texts], other: Sequence[Texts]
) -> Difference:
    """Compare how often texts part, a token compared, over the texts of all models together.

    The texts of one model part some ten times, a number that is uncertain by its square root: twice
    as many of one model alone say nothing. Over all models it is a matter of some seventy.
    """
    mine, own = (_partings(zip(texts, theirs, strict=True)) for texts in (ours, other))
    return Difference(mine, own, "partings a token")


def _partings(pairs: Any) -> float:
    n_parted = n_compared = 0
    for texts, theirs in pairs:
        ends = dict(first_differences(texts, theirs))
        n_parted += len(ends)
        n_compared += sum(ends.get(i, len(text) - 1) + 1 for i, text in enumerate(theirs))
    return n_parted / n_compared


class Report:
    """Lists what parts: one JSON object a line in folder/cuda-contract.jsonl, if there is a folder.

    A run of the tests begins a new file.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "cuda-contract.jsonl" if folder else None
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")

    def add(self, what: str, **facts: Any) -> None:
        """Append one line: what it is about, and facts that JSON can hold."""
        if self.path:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"what": what, **facts}) + "\n")

    def judge(self, what: str, found: Sequence[Difference]) -> None:
        """Write down and print how ours compares; fail if anything is beyond the bound."""
        for diff in found:
            self.add(what, number=diff.what, ours=diff.ours, upstream=diff.upstream)
            print(f"{what}: {diff}")
        wrong = [str(diff) for diff in found if not diff.within]
        assert not wrong, f"{what}: " + "; ".join(wrong)
