"""Beginnings of prompts on disk: what memory has no room for, and what outlives the process.

A folder has a file for each place that prompts can go on from (prefixfile.py). It holds the KV rows
since another file's end, its parent's, so that rows are not written twice. A thread writes the
files; everything else happens on the engine's thread.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..resident.hostcopies import RowsCopy, StatesCopy
from . import prefixfile
from .prefixfile import DamagedFile, Head, Widths
from .prefixtree import Path as TreePath
from .prefixtree import n_common

Ids = npt.NDArray[np.int32]
_SUFFIX = ".prefix"
# How files are named here; others in the folder are somebody else's. With an end, one is half done.
_NAME = re.compile(rf"[0-9a-f]{{16}}-[0-9a-f]{{32}}\{_SUFFIX}(\.[0-9a-z_]+\{prefixfile.PART})?")
# A half-done file of this age has no writer any more, in seconds.
_ABANDONED_S = 3600.0


@dataclass(eq=False)
class Entry:
    """A file: where it is, what it says, its size, and when it was used last (ns)."""

    path: Path
    head: Head
    used: int

    @property
    def end(self) -> int:
        """Return the position after its run."""
        return self.head.first + self.head.n_tokens


@dataclass(eq=False)
class _Write:
    """A file that is being written, the states that it gets, and whether nobody else has them."""

    future: Future[Entry]
    states: StatesCopy
    is_given: bool = False


class PrefixDisk:
    """The files of one model and its settings in a folder, of at most max_bytes.

    messages: what went wrong, one line each.
    """

    def __init__(self, folder: Path, identity: str, widths: Widths, max_bytes: int) -> None:
        """Read what the folder has; files of other models or settings stay as they are.

        identity: of the model, and of all that its KV rows and states depend on. widths: of these.
        """
        self._folder, self._identity, self.max_bytes = folder, identity, max_bytes
        self._widths = widths
        self.messages: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._children: dict[str, list[Entry]] = {}
        self._others: list[tuple[int, int, Path]] = []  # when used, bytes, path
        self._writing: list[_Write] = []
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        prefixfile.private_folder(folder)
        try:
            found = _files(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep prompts there: {error.strerror}") from error
        for path in found:
            self._open(path)
        if self._others:
            n = len(self._others)
            files = "1 file is" if n == 1 else f"{n} files are"
            self.messages.append(f"{folder}: {files} of another model or other settings; not used")
        self._drop_orphans()
        self._shrink()

    def _open(self, path: Path) -> None:
        """Note a file."""
        try:
            head, used = prefixfile.read_head(path), path.lstat().st_mtime_ns
            if head.identity == self._identity:
                head.require(self._widths)
                if path.name != _name(head):
                    raise DamagedFile("its name is another one's")
        except (DamagedFile, OSError) as error:
            self._forget_damaged(path, error)
            return
        if head.identity == self._identity:
            self._note(Entry(path, head, used))
        else:
            self._others.append((used, head.n_bytes, path))

    def _note(self, entry: Entry) -> None:
        self._entries[entry.head.key] = entry
        self._children.setdefault(entry.head.parent, []).append(entry)

    def _forget_damaged(self, path: Path, error: Exception) -> None:
        self.messages.append(f"{path}: {error}; the file is not used")
        if isinstance(error, DamagedFile):
            _unlink(path)

    def _drop_orphans(self) -> None:
        """Forget files without the beginning that they go on from."""
        while True:
            entries = self._entries
            ends = {key: entry.end for key, entry in entries.items()}
            found = [e for e in entries.values() if e.head.first != ends.get(e.head.parent, 0)]
            if not found:
                return
            for entry in found:
                self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """Delete a file."""
        self._entries.pop(entry.head.key, None)
        siblings = self._children.get(entry.head.parent, [])
        if entry in siblings:
            siblings.remove(entry)
        _unlink(entry.path)

    @property
    def n_bytes(self) -> int:
        """Return the disk space of all files, those of other models too."""
        others = sum(size for _, size, _ in self._others)
        return others + sum(e.head.n_bytes for e in self._entries.values())

    @property
    def n_places(self) -> int:
        """Return how many beginnings the files have."""
        return len(self._entries)

    @property
    def pending_bytes(self) -> int:
        """Return the host memory of what is being written."""
        self._reap()
        return sum(write.states.n_bytes for write in self._writing if write.is_given)

    def find(self, ids: Ids, owner: str = "") -> list[Entry]:
        """Return an owner's files whose runs make the longest beginning of ids, in order."""
        self._reap()
        best: list[Entry] = []
        waiting = [best]
        while waiting:
            found = waiting.pop()
            parent, first = (found[-1].head.key, found[-1].end) if found else (owner, 0)
            if found and (not best or first > best[-1].end):
                best = found
            for entry in self._children.get(parent, ()):
                tokens = entry.head.tokens
                if n_common(tokens, ids[first : first + len(tokens)]) == len(tokens):
                    waiting.append([*found, entry])
        return best

    def rows(self, entry: Entry) -> RowsCopy | None:
        """Read the KV rows of a file's run; None if the file is damaged, which deletes it."""
        try:
            found = RowsCopy(*prefixfile.read_rows(entry.path, entry.head))
            entry.used = _touch(entry.path)
            return found
        except (DamagedFile, OSError) as error:
            self._lose(entry, error)
            return None

    def states(self, entry: Entry, copy: StatesCopy) -> bool:
        """Read the states of a file; return whether that went well."""
        try:
            prefixfile.read_states(entry.path, entry.head, copy.array[: entry.head.n_states])
            if not copy.is_finite:
                raise DamagedFile("its states are not finite")
            return True
        except (DamagedFile, OSError) as error:
            self._lose(entry, error)
            return False

    def _lose(self, entry: Entry, error: Exception) -> None:
        """Forget a damaged file, and those that go on from it."""
        self._forget_damaged(entry.path, error)
        self._drop(entry)
        self._drop_orphans()

    def give(self, path: TreePath, states: StatesCopy) -> None:
        """Take the states at the end of a path over, and write them unless that has been done."""
        self.write(path, states)
        for write in self._writing:
            write.is_given |= write.states is states

    def write(self, path: TreePath, states: StatesCopy | None) -> bool:
        """Begin to write the beginning at the end of a path, unless there is a file for it.

        states: at its end. They stay as they are until it is written, or are given. Return whether
        a file has been begun.
        """
        if states is None or any(write.states is states for write in self._writing):
            return False
        if not all(c.has_arrived for c in (states, *(node.rows for node in path)) if c):
            return False
        ids = np.concatenate([node.tokens for node in path])
        owner = path[0].owner
        known = self.find(ids, owner)
        first = known[-1].end if known else 0
        parts = _rows_from(path, first)
        if first == len(ids) or parts is None or self._has_failed:
            return False
        parent, n_states = known[-1].head.key if known else owner, self._widths.states
        head, data = prefixfile.head_of(self._identity, parent, first, ids[first:], parts, n_states)
        if head.n_bytes > self.max_bytes:
            return False
        target = self._folder / _name(head)
        kept = states.array[: head.n_states]

        def work() -> Entry:
            prefixfile.write_file(target, head, data, kept)
            return Entry(target, head, target.stat().st_mtime_ns)

        self._writing.append(_Write(self._thread.submit(work), states))
        return True

    def _reap(self) -> None:
        """Note the files that were written since, and give up their memory."""
        while self._writing and self._writing[0].future.done():
            write = self._writing.pop(0)
            error = write.future.exception()
            if error is None:
                self._note(write.future.result())
                self._shrink()
                self._drop_orphans()
            elif not self._has_failed:
                self._has_failed = True
                self.messages.append(
                    f"{self._folder}: prompts cannot be kept on disk any more: {error}"
                )

    def _shrink(self) -> None:
        """Delete files until the limit holds: those of other models, then those used longest ago.

        A file that others go on from stays until they have gone.
        """
        self._others.sort(reverse=True)
        while self.n_bytes > self.max_bytes:
            if self._others:
                _unlink(self._others.pop()[2])
                continue
            last = [e for e in self._entries.values() if not self._children.get(e.head.key)]
            self._drop(min(last, key=lambda entry: entry.used))

    def wait(self) -> None:
        """Wait until everything is written."""
        for write in self._writing:
            write.future.exception()
        self._reap()

    def drain_messages(self) -> list[str]:
        """Return the messages since the last call."""
        found, self.messages = self.messages, []
        return found

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.wait()
        self._thread.shutdown()


def _files(folder: Path) -> list[Path]:
    """Return the files that were written here, and delete what was left half done."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        name = _NAME.fullmatch(path.name)
        if name and not name[1]:
            found.append(path)
        elif name:
            with suppress(FileNotFoundError):  # its writer may end just now
                if path.lstat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()
    return found


def _name(head: Head) -> str:
    return f"{head.identity[:16]}-{head.key}{_SUFFIX}"


def _unlink(path: Path) -> None:
    with suppress(OSError):  # then it stays, and is found again at the next start
        path.unlink(missing_ok=True)


def _touch(path: Path) -> int:
    """Note that a file was used now; return the time (ns)."""
    os.utime(path, follow_symlinks=False)
    return path.lstat().st_mtime_ns


def _rows_from(path: TreePath, first: int) -> RowsCopy | None:
    """Return the rows of a path from position `first` on; None if some are missing."""
    found: list[RowsCopy] = []
    end = 0
    for node in path:
        start, end = end, end + len(node.tokens)
        if end <= first:
            continue
        if node.rows is None:
            return None
        found.append(node.rows if start >= first else node.rows.split(first - start)[1])
    return RowsCopy.joined(found) if found else None
