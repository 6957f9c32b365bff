"""Look-up in dictated texts on a card whose passes take what an H200 took: no pass is computed.

Drafts are those of the real look-up, by the real rules of an engine; the text says which are right.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.recorded_drafts import Card, Trouble, engine
from moegraph.draft.lookup import LookUp
from moegraph.passes.speculation import Ask, Speculation, StepSeconds, step_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from _repeats import TEXTS, hopeless

KINDS = (*TEXTS, "hopeless")


def words(kind: str, n_tokens: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt and of an answer; a token is a word, a digit or a sign."""
    rng = random.Random(seed)
    if kind == "hopeless":
        found = hopeless(rng, 600 + n_tokens)
        return found[:600], found[600:]
    known: dict[str, int] = {}
    prompt, answer = (
        [known.setdefault(word, len(known)) for word in re.findall(r"[a-z]+|\s+|.", part)]
        for part in TEXTS[kind](rng)
    )
    return prompt, answer[:n_tokens]


@dataclass
class Written:
    """What writing took: milliseconds, tokens, and steps by rows."""

    ms: float = 0.0
    tokens: int = 0
    rows: dict[int, int] = field(default_factory=dict)


def write(
    card: Card, speculation: Speculation | None, prompt: Sequence[int], answer: Sequence[int],
    written: Written,
) -> None:  # fmt: skip
    """Write an answer, whose first token comes from the prompt, and add what that takes."""
    text, at = [*prompt, *answer], len(prompt)  # of the anchor
    if speculation:
        speculation.begin(0, prompt)
    while at < len(text) - 1:
        n_left, proposal = len(text) - 1 - at, None
        if speculation:
            proposal = speculation.propose(Ask(0, text[at], n_left, 1 << 20))
            # not what it took here, where other programs run
            proposal = proposal and replace(proposal, drafter_s=5e-6)
        spine = proposal.spine if proposal else []
        pairs = enumerate(zip(spine, text[at + 1 :]))
        n_right = next((n for n, (a, b) in pairs if a != b), len(spine))
        n_taken = min(n_right + 1, n_left)
        n_rows = proposal.tree.n_rows if proposal else 1
        ms, noisy_ms, n_missing = card.step(n_rows, n_taken)
        written.ms += ms
        written.tokens += n_taken
        written.rows[n_rows] = written.rows.get(n_rows, 0) + 1
        if speculation:
            seconds = StepSeconds(noisy_ms / 1e3, noisy_ms / 1e3, 0.0)
            drawn = text[at + 1 : at + 1 + n_taken]
            speculation.controller.observe(step_of(proposal, drawn, seconds, n_missing))
            if not proposal:
                speculation.foresee(0, n_left - n_taken, text[at])
            speculation.committed(0, text[at : at + n_taken])
        at += n_taken
        card.read(n_taken)


def quiet(share: float, seed: int = 1) -> Card:
    """Return a card without noise."""
    return Card(share, seed, Trouble(0.0, 0.0))


def opened(share: float, spec: str) -> Speculation:
    """Return what drafts in an engine without a drafter's file."""
    return Speculation([LookUp()], engine(share, "lookup", spec=spec), 1 << 20, 16)


def speed(share: float, spec: str, kinds: Sequence[str], skipped: int = 0) -> float:
    """Return the speed of texts that one process writes over that without drafts.

    skipped: the first texts, which do not count.
    """
    drafted, plain = Written(), Written()
    for seed in range(3):
        speculation, card = opened(share, spec), Card(share, seed)
        for at, kind in enumerate(kinds):
            prompt, answer = words(kind, 512, 10 * seed + at)
            write(card, speculation, prompt, answer, drafted if at >= skipped else Written())
            if at >= skipped:
                write(quiet(share), None, prompt, answer, plain)
    return plain.ms / drafted.ms
