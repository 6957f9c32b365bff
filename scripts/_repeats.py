"""Texts that repeat themselves, and texts that do not, for measuring look-up."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

WORDS = """
order item price total tax rate count index value result buffer offset length width height node
child parent left right key name path file line token state cache slot page block layer row batch
""".split()
VERBS = "load store find read write add drop merge split check count move copy open close".split()
# What a match of so many tokens foretells counts as repeated.
_MATCH = 3


def code_line(rng: random.Random) -> str:
    """Return a line of code made of usual words."""
    a, b, c, d = (rng.choice(WORDS) for _ in range(4))
    verb = rng.choice(VERBS)
    return rng.choice([
        f"    {a}_{b} = {verb}_{c}({d}, {a})\n", f"    if {a}.{b} > {c}:\n",
        f"        self.{a} += {b}[{c}]\n", f"    return {verb}_{a}({b}, {c}_{d})\n",
    ])  # fmt: skip


def edit(rng: random.Random) -> tuple[str, str]:
    """Return lines, and the same with one word changed in every sixth."""
    lines = [code_line(rng) for _ in range(100)]
    changed = list(lines)
    for at in range(3, len(lines), 6):
        word = next(word for word in WORDS if word in lines[at])
        changed[at] = lines[at].replace(word, rng.choice(VERBS) + "ed", 1)
    return "".join(lines) + "\n# edited:\n", "".join(changed)


def records(rng: random.Random) -> tuple[str, str]:
    """Return the beginning of a list of records, and how it goes on."""
    found = [
        json.dumps({
            "id": rng.randint(1000, 9999), "name": f"{rng.choice(WORDS)} {rng.choice(WORDS)}",
            "price": rng.randint(100, 99999) / 100, "in_stock": rng.random() < 0.5,
            "tags": [rng.choice(WORDS)], "supplier": {"country": rng.choice(["DE", "FR", "US"])},
        }) + ",\n"
        for _ in range(60)
    ]  # fmt: skip
    return "[" + "".join(found[:8]), "".join(found[8:])


def mixed(rng: random.Random) -> tuple[str, str]:
    """Return lines, and four of them in turn with four new ones."""
    lines = [code_line(rng) for _ in range(100)]
    new = [code_line(rng) for _ in range(100)]
    blocks = (lines[at : at + 4] + new[at : at + 4] for at in range(0, 100, 4))
    return "".join(lines), "".join(line for block in blocks for line in block)


TEXTS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "edit": edit, "list": records, "mixed": mixed,
}  # fmt: skip


def hopeless(rng: random.Random, n: int) -> list[int]:
    """Return a text in which three tokens are followed by another fourth each time."""
    found, followed = [1, 2, 3], defaultdict[tuple[int, ...], set[int]](set)
    while len(found) < n:
        seen = followed[tuple(found[-3:])]
        token = rng.choice([id_ for id_ in range(1, 11) if id_ not in seen] or [rng.randint(1, 10)])
        seen.add(token)
        found.append(token)
    return found


def foretold(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of an answer's tokens that followed the same tokens where these were last.

    Of the latest place of each, without drafts: what a drafter could know at each token.
    """
    text, last, n_right = [*prompt, *answer], dict[tuple[int, ...], int](), 0
    for at in range(_MATCH, len(text)):
        key = tuple(text[at - _MATCH : at])
        if at >= len(prompt) and key in last:
            n_right += text[last[key]] == text[at]
        last[key] = at
    return n_right / len(answer)
