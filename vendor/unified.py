"""Apply unified diffs exactly: every context line must match at the line that the hunk names.

git and patch accept a hunk at another line, which is always an error here because the tree is
pinned. Also, not every machine with a compiler has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch does not apply to the tree."""


@dataclass
class Hunk:
    """One hunk: its first line in the old file (1-based) and its lines with their marks."""

    start: int
    n_old: int
    n_new: int
    lines: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """All hunks for one file; `path` is relative to the root of the tree."""

    path: str
    hunks: list[Hunk] = field(default_factory=list)


def parse(text: str, name: str) -> list[FileDiff]:
    """Read the file diffs of one patch; text before the first `--- ` line of a diff is ignored.

    Raises:
        PatchError: a new file, a deletion, a rename, a binary diff, or a hunk shorter than its
            header says.
    """
    files: list[FileDiff] = []
    lines = iter(text.split("\n"))
    for line in lines:
        if line.startswith(("rename ", "deleted file ", "GIT binary ", "Binary files ")):
            raise PatchError(f"{name}: a patch can only change files, found {line!r}")
        if line.startswith(("new file ", "--- /dev/null")):
            raise PatchError(f"{name}: adds a file; a file of ours belongs in native/")
        if line.startswith("--- a/"):
            target = next(lines, "")
            if not target.startswith("+++ b/"):
                raise PatchError(f"{name}: expected '+++ b/PATH' after {line!r}, found {target!r}")
            files.append(FileDiff(target[len("+++ b/") :]))
        elif match := _HUNK.match(line):
            if not files:
                raise PatchError(f"{name}: hunk before any file header: {line!r}")
            files[-1].hunks.append(_read_hunk(match, lines, name))
    if not files:
        raise PatchError(f"{name}: holds no diff")
    return files


def _read_hunk(match: re.Match[str], lines: Iterator[str], name: str) -> Hunk:
    start, n_old, _, n_new = (int(g) if g else 1 for g in match.groups())
    hunk = Hunk(start, n_old, n_new)
    while n_old > 0 or n_new > 0:
        line = next(lines, None)
        if line is None or line[:1] not in (" ", "+", "-"):
            raise PatchError(f"{name}: hunk '{match.group(0)}' ends early")
        n_old -= line[0] != "+"
        n_new -= line[0] != "-"
        hunk.lines.append(line)
    return hunk


def apply(diff: FileDiff, old: str | None, name: str) -> str:
    """Return the text of one file after its hunks; `old` is None if the file does not exist.

    Raises:
        PatchError: a context line or removed line differs, or there is no such file.
    """
    if old is None:
        raise PatchError(f"{name}: {diff.path} does not exist")
    source = old.split("\n")
    out: list[str] = []
    done = 0
    for hunk in diff.hunks:
        begin = hunk.start - 1 if hunk.n_old else hunk.start
        out += source[done:begin]
        done = begin
        for line in hunk.lines:
            if line[0] != "+":
                if done >= len(source) or source[done] != line[1:]:
                    found = source[done] if done < len(source) else "end of file"
                    raise PatchError(
                        f"{name}: {diff.path}:{done + 1}: expected {line[1:]!r}, found {found!r}"
                    )
                done += 1
            if line[0] != "-":
                out.append(line[1:])
    out += source[done:]
    return "\n".join(out)


def apply_series(
    patches: list[tuple[str, str]], read: Callable[[str], str | None]
) -> dict[str, str]:
    """Apply (name, text) patches in order on top of each other; return path -> new text.

    `read` returns the pristine text of a path, or None if there is no such file.

    Raises:
        PatchError: names the first patch that does not apply.
    """
    texts: dict[str, str] = {}
    for name, text in patches:
        for diff in parse(text, name):
            old = texts[diff.path] if diff.path in texts else read(diff.path)
            texts[diff.path] = apply(diff, old, name)
    return texts
