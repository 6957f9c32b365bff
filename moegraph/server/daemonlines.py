"""The lines that `moegraph daemon` reads, parsed: a command, whom it is for, and its options."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RequestError
from ..sampling import SamplingParams

# A line that begins with a file of token ids, and not with a command.
PROMPT = "PROMPT"
GREEDY = SamplingParams(temperature=0.0)
# The window of the repeat penalty in the protocol; it has no word for it.
_PENALTY_WINDOW = 256
_PREFIXES = {"REQ": "request", "REQUEST": "request", "SLOT": "slot"}
_SAME = {"CONT": "CONTINUE", "exit": "quit"}
_COMMANDS = frozenset({
    PROMPT, "generate", "RESTORE", "SNAPSHOT", "FREE_SNAPSHOT", "LIST_SLOTS", "START", "CONTINUE",
    "CANCEL", "SCHED_STEP", "SCHED_DRAIN", "LIST_REQUESTS", "LIST_TARGET_CACHE_SLOTS", "quit",
})  # fmt: skip
# Commands of the protocol for which there is nothing here: the model is never parked, prompts are
# not compressed, parts of a snapshot are not joined, and every pass takes all sequences that run.
_UNSUPPORTED = frozenset({
    "park", "unpark", "free", "drafter", "compress", "RESTORE_CHAIN", "SNAPSHOT_THIN",
    "SCHED_BATCH_PEEK", "SCHED_BATCH_PROBE", "SCHED_BATCH_TARGET_TAIL", "SCHED_BATCH_TARGET_STEP",
    "SCHED_BATCH_DRAIN",
})  # fmt: skip


class LineError(RequestError):
    """A line cannot be obeyed. code: the word after "err" in the reply."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code} {detail}".rstrip())


@dataclass(frozen=True)
class Line:
    """A parsed line.

    words: what follows the command. request, slot: of the prefixes REQ and SLOT; None without.
    snap: position in the prompt and number of the snapshot to take there. sampling: of samp=; None
    without.
    """

    command: str
    words: tuple[str, ...] = ()
    request: int | None = None
    slot: int | None = None
    snap: tuple[int, int] | None = None
    sampling: SamplingParams | None = None


def parse_line(text: str) -> Line | None:
    """Parse a line; None if it is empty.

    Raises:
        LineError: the command is unknown or unsupported, or a part of it is malformed.
    """
    words = text.split()
    found: dict[str, int] = {}
    while words and words[0] in _PREFIXES:
        if len(words) < 2:
            raise LineError("bad_args", f"{words[0]} needs a number")
        found[_PREFIXES[words[0]]] = _integer(words[1], words[0])
        words = words[2:]
    if not words:
        return Line("", (), found.get("request"), found.get("slot")) if found else None
    command = _command(words)
    options = words if command == PROMPT else words[1:]
    snap = next((_snap(w[5:]) for w in options if w.startswith("snap=")), None)
    sampling = next((_sampling(w[5:]) for w in options if w.startswith("samp=")), None)
    rest = tuple(w for w in options if not w.startswith(("snap=", "samp=")))
    return Line(command, rest, found.get("request"), found.get("slot"), snap, sampling)


def _command(words: list[str]) -> str:
    word = _SAME.get(words[0], words[0])
    if word in _UNSUPPORTED:
        raise LineError("unsupported", word)
    if word in _COMMANDS - {PROMPT}:
        return word
    is_path = word.startswith(".") or "/" in word
    if is_path or (len(words) > 1 and words[1].isdecimal()):
        return PROMPT
    raise LineError("unknown_command", word)


def integers(line: Line, names: str, at: int = 0) -> list[int]:
    """Return the words of a line from `at` on as positive numbers, one for each name.

    Raises:
        LineError: one is missing, is no number, or is not positive.
    """
    wanted = names.split()
    given = line.words[at:]
    if len(given) != len(wanted):
        how = " ".join([*("FILE" for _ in range(at)), *(name.upper() for name in wanted)])
        raise LineError("bad_args", f"{line.command} takes {how or 'nothing'}")
    values = [_integer(word, name) for word, name in zip(given, wanted)]
    for value, name in zip(values, wanted):
        if value < 1:
            raise LineError("bad_args", f"{name} is {value}; allowed: 1 and more")
    return values


def _integer(word: str, name: str) -> int:
    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise LineError("bad_args", f"{name} is {word!r}, which is no number")
    return int(word)


def _snap(text: str) -> tuple[int, int]:
    position, _, number = text.partition(":")
    found = _integer(position, "position"), _integer(number, "snapshot")
    if found[0] < 1:
        raise LineError("bad_args", f"snap={text}: a position is 1 or more")
    return found


def _sampling(text: str) -> SamplingParams:
    """Return the settings of samp=temp,top_p,top_k,rep_pen,seed[,freq_pen,pres_pen]."""
    parts = text.split(",")
    if len(parts) not in (5, 7):
        raise LineError("bad_args", f"samp={text}: five or seven numbers, separated by commas")
    try:
        temperature, top_p, repeat = (float(parts[i]) for i in (0, 1, 3))
        frequency, presence = (float(p) for p in [*parts[5:], "0", "0"][:2])
        top_k, seed = int(parts[2]), int(parts[4])
    except ValueError:
        raise LineError("bad_args", f"samp={text}: not all of these are numbers") from None
    return SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=0.0, repeat_penalty=repeat,
        repeat_last_n=_PENALTY_WINDOW, frequency_penalty=frequency, presence_penalty=presence,
        seed=seed,
    ).seeded()  # fmt: skip
