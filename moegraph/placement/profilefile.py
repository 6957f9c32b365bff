"""The routing profile of a run: the run reads it at the start and adds its choices at the end.

A run writes to the file that the user named, or to the file beside the model if that exists; it
creates no other file and leaves read-only files unchanged. A bad file that the user named is an
error. The file beside the model may come from somebody else: if it is not a profile of this model,
the run ignores it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, MoegraphError
from .draftcounts import DraftCounts, less
from .identity import RouterShape
from .profile import Profile, read_profile, require_class_name

DEFAULT_CLASS = "default"
# Adding to a file takes milliseconds, so a run does not wait longer for other processes.
_LOCK_SECONDS = 2.0
_LOCK_POLL_SECONDS = 0.01
_NONE: DraftCounts = {}


@dataclass(frozen=True)
class ProfileUpdate:
    """Whether a run updated its profile.

    n_tokens: tokens whose choices the run had to add. why: why it did not add them; empty if it
    did. is_expected: the user knows the reason, such as a read-only file, so no warning is due.
    """

    path: str
    class_name: str
    n_tokens: int
    why: str = ""
    is_expected: bool = False

    @property
    def warning(self) -> str:
        """Return one line for the user; empty if no warning is due."""
        if not self.why or self.is_expected:
            return ""
        return f"the routing profile was not updated: {self.why}"

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "path": self.path, "class": self.class_name, "n_tokens": self.n_tokens,
            "written": not self.why, "why_not": self.why or None,
        }  # fmt: skip


class ProfileFile:
    """A profile with its path, and the class that a run reads and updates.

    class_name: empty to read all classes together and to update 'default'. is_named: the user gave
    the path, so the file may be new. Otherwise it is beside the model, and a bad file is ignored
    unless a class was given.
    """

    def __init__(self, path: Path, class_name: str, is_named: bool, shape: RouterShape) -> None:
        self.path = path
        self.class_name = class_name or DEFAULT_CLASS
        require_class_name(self.class_name)
        self._is_named = is_named
        self._shape = shape
        self._n_added: npt.NDArray[np.int64] | int = 0  # to the file
        self._drafts_added: DraftCounts = {}
        self._ignored = ""  # why the file is ignored
        try:
            self.profile = self._read(path)
        except MoegraphError as error:
            if is_named or class_name:
                raise
            self.profile, self._ignored = Profile(shape), str(error)
        self._reads = class_name if class_name in self.profile.classes else None
        self.warning = self._warning(class_name)

    def _read(self, path: Path) -> Profile:
        try:
            exists, has_folder = path.exists(), path.parent.is_dir()
        except OSError as error:
            raise ConfigError(f"{path}: cannot use it as a profile: {error.strerror}") from error
        if exists:
            return read_profile(path, self._shape)
        if not has_folder:
            raise ConfigError(f"{path}: cannot make a profile: there is no folder {path.parent}")
        return Profile(self._shape)

    def _warning(self, class_name: str) -> str:
        if self._ignored:
            return (
                f"the routing profile beside the model is ignored: {self._ignored}; remove the "
                "file, or silence this with --profile none"
            )
        known = ", ".join(sorted(self.profile.classes))
        if not known:
            is_new = not self.profile.drafts
            return f"{self.path}: no profile yet; this run creates it" if is_new else ""
        if class_name and self._reads is None:
            return f"{self.path}: no class {class_name!r} yet (it has: {known}); all are used"
        return ""

    @property
    def demand(self) -> list[list[float]] | None:
        """`Profile.demand` as lists; None without any class."""
        return self.profile.demand().tolist() if self.profile.classes else None

    def starts(self, n_layer: int) -> list[tuple[list[int], list[float]] | tuple[None, None]]:
        """Return each layer's experts, best first, and `Profile.shares` of it; None if unknown."""
        if not self.profile.classes:
            return [(None, None)] * n_layer
        ranking, shares = self.profile.ranking(self._reads), self.profile.shares(self._reads)
        return list(zip(ranking.tolist(), shares.tolist()))

    def update(
        self, counts: npt.NDArray[np.int64] | None, drafts: DraftCounts = _NONE
    ) -> ProfileUpdate:
        """Add what a run chose since the last update to the class in the file; never raise.

        counts: all choices of the run so far [n_layer, n_expert]; None if they are not counted.
        drafts: how right all drafts were, to add too. The file is read again first, because other
        runs may have updated it.
        """
        if counts is None:
            counts = np.zeros(self._shape.sizes[:2], np.int64)
        new, new_drafts = counts - self._n_added, less(drafts, self._drafts_added)
        n_tokens = int(new.sum(axis=1).max()) // self._shape.n_expert_used
        where = (str(self.path), self.class_name, n_tokens)
        if not n_tokens and not new_drafts:
            return ProfileUpdate(*where, "the run computed no token", is_expected=True)
        if self._ignored:
            return ProfileUpdate(*where, f"it was ignored: {self._ignored}", is_expected=True)
        try:
            update = self._add(new, new_drafts, where)
        except (MoegraphError, OSError, RuntimeError) as error:  # RuntimeError: circular links
            return ProfileUpdate(*where, str(error))
        if not update.why:
            self._n_added, self._drafts_added = counts, drafts
        return update

    def _add(
        self, counts: npt.NDArray[np.int64], drafts: DraftCounts, where: tuple[str, str, int]
    ) -> ProfileUpdate:
        path = self.path.resolve()  # do not replace a symbolic link
        if not path.exists() and not self._is_named:
            return ProfileUpdate(*where, f"{path} was removed during the run", is_expected=True)
        if path.exists() and not os.access(path, os.W_OK):
            return ProfileUpdate(*where, f"{path} is read-only", is_expected=True)
        if not os.access(path.parent, os.W_OK):
            why = f"the folder {path.parent} is read-only"
            return ProfileUpdate(*where, why, is_expected=not self._is_named)
        with _locked(path.parent) as has_lock:
            if not has_lock:
                why = f"another process has locked the folder {path.parent} for {_LOCK_SECONDS:g} s"
                return ProfileUpdate(*where, why)
            profile = self._read(path)
            if where[2]:
                profile.add(self.class_name, counts, where[2])
            profile.add_drafts(drafts)
            profile.save(path)
        return ProfileUpdate(*where)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, so that one process at a time updates its profiles.

    Yields False if another process holds the lock for _LOCK_SECONDS: any process that can read the
    folder can hold it forever. Yields True if the system cannot lock the folder. The file itself
    cannot be locked, because saving replaces it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, time.monotonic() + _LOCK_SECONDS)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> bool:
    """Wait for a lock; return False if another process still has it at the deadline."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:
            return True  # the file system has no locks


def open_profile(
    name: str, class_name: str, beside: Path, shape: Callable[[], RouterShape]
) -> ProfileFile | None:
    """Return the named profile, or the one beside the model if that exists, else None.

    name: a path, 'none', or empty for the profile beside the model. shape: called only if there is
    a profile.
    """
    if name == "none" or (not name and not beside.is_file()):
        if class_name:
            raise ConfigError(f"profile_class {class_name!r} needs a profile; give --profile FILE")
        return None
    if name:
        return ProfileFile(Path(name), class_name, True, shape())
    return ProfileFile(beside, class_name, False, shape())
