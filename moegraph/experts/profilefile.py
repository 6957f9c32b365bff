"""The routing profile of a run: read when it starts, what the run saw added when it ends.

A profile is written where the user can expect it: to the file that was named, or to the one beside
the model once there is one. No file appears unasked, and none is changed that is read-only. A file
that was named has to be right. The one beside the model may be anybody's: if it is not a profile of
this model, the run goes on without it.
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
from .identity import RouterShape
from .profile import Profile, read_profile, require_class_name

DEFAULT_CLASS = "default"
# Adding to a file takes some milliseconds; a run does not wait longer for others to end.
_LOCK_SECONDS = 2.0
_LOCK_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class ProfileUpdate:
    """What became of a profile at the end of a run.

    n_tokens: tokens whose choices the run had to add. why: why they were not added; empty if they
    were. is_expected: the reason is one the user knows, such as a read-only file.
    """

    path: str
    class_name: str
    n_tokens: int
    why: str = ""
    is_expected: bool = False

    @property
    def warning(self) -> str:
        """Return the line that a user should see; empty when all is as expected."""
        if not self.why or self.is_expected:
            return ""
        return f"the routing profile stays as it was: {self.why}"

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "path": self.path, "class": self.class_name, "n_tokens": self.n_tokens,
            "written": not self.why, "why_not": self.why or None,
        }  # fmt: skip


class ProfileFile:
    """A profile by its path, and the class of it that a run belongs to.

    class_name: empty for all classes together when reading, and 'default' when writing. is_named:
    the user gave the path, so the file may be new; else it lies beside the model, and is left aside
    if it is not right and no class was asked for.

    Raises:
        ConfigError: the file is new and its folder does not exist.
        RequestError: the file is damaged or of another model, or the class name is unusable.
    """

    def __init__(self, path: Path, class_name: str, is_named: bool, shape: RouterShape) -> None:
        self.path = path
        self.class_name = class_name or DEFAULT_CLASS
        require_class_name(self.class_name)
        self._is_named = is_named
        self._shape = shape
        self._left_aside = ""
        try:
            self.profile = self._read(path)
        except MoegraphError as error:
            if is_named or class_name:
                raise
            self.profile, self._left_aside = Profile(shape), str(error)
        self._reads = class_name if class_name in self.profile.classes else None
        self.warning = self._note(class_name)

    def _read(self, path: Path) -> Profile:
        try:
            is_there, has_folder = path.exists(), path.parent.is_dir()
        except OSError as error:
            raise ConfigError(f"{path}: cannot keep a profile: {error.strerror}") from error
        if is_there:
            return read_profile(path, self._shape)
        if not has_folder:
            raise ConfigError(f"{path}: cannot keep a profile: there is no folder {path.parent}")
        return Profile(self._shape)

    def _note(self, class_name: str) -> str:
        if self._left_aside:
            return (
                f"the routing profile beside the model is left aside: {self._left_aside}; remove "
                "the file, or silence this with --profile none"
            )
        known = ", ".join(sorted(self.profile.classes))
        if not known:
            return f"{self.path}: no profile yet; this run begins it"
        if class_name and self._reads is None:
            return f"{self.path}: no class {class_name!r} yet (it has: {known}); all are used"
        return ""

    @property
    def demand(self) -> list[list[float]] | None:
        """How often a token chooses the best, second best, ... expert of each layer, if known."""
        return self.profile.demand().tolist() if self.profile.classes else None

    def starts(self, n_layer: int) -> list[tuple[list[int], list[float]] | tuple[None, None]]:
        """Return for each layer its experts, best first, and their shares; None if not known."""
        if not self.profile.classes:
            return [(None, None)] * n_layer
        ranking, shares = self.profile.ranking(self._reads), self.profile.shares(self._reads)
        return list(zip(ranking.tolist(), shares.tolist()))

    def update(self, counts: npt.NDArray[np.int64]) -> ProfileUpdate:
        """Add choices [n_layer, n_expert] to the class in the file as it is now; never raise.

        The file is read again first: other runs may have added to it meanwhile.
        """
        n_tokens = int(counts[0].sum()) // self._shape.n_expert_used
        where = (str(self.path), self.class_name, n_tokens)
        if not n_tokens:
            return ProfileUpdate(*where, "the run computed no token", is_expected=True)
        if self._left_aside:
            return ProfileUpdate(*where, f"it was left aside: {self._left_aside}", is_expected=True)
        try:
            return self._add(counts, where)
        except (MoegraphError, OSError, RuntimeError) as error:  # resolve: links in a circle
            return ProfileUpdate(*where, str(error))

    def _add(self, counts: npt.NDArray[np.int64], where: tuple[str, str, int]) -> ProfileUpdate:
        path = self.path.resolve()  # a symbolic link stays one
        if not path.exists() and not self._is_named:
            return ProfileUpdate(*where, f"{path} was removed meanwhile", is_expected=True)
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
            profile.add(self.class_name, counts, where[2])
            profile.save(path)
        return ProfileUpdate(*where)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Let one process at a time add to the profiles of a folder, where the system can lock it.

    Yields False when another process did not give up its lock for some seconds: whoever can read
    the folder can hold one for ever. The folder and not the file: saving replaces the file, and a
    file to lock would appear unasked.
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
    """Wait for a lock; return whether nobody else has it."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:
            return True  # this file system has no locks


def open_profile(
    name: str, class_name: str, beside: Path, shape: Callable[[], RouterShape]
) -> ProfileFile | None:
    """Return the profile that was named, or the one beside the model if there is one.

    name: a path, 'none', or empty for the one beside the model. shape: called when there is one.
    A file that was not named, and of which no class was named, is left aside if it is not right.

    Raises:
        ConfigError, RequestError: as ProfileFile, or a class was given without a profile.
    """
    if name == "none" or (not name and not beside.is_file()):
        if class_name:
            raise ConfigError(f"profile_class {class_name!r} needs a profile; give --profile")
        return None
    if name:
        return ProfileFile(Path(name), class_name, True, shape())
    return ProfileFile(beside, class_name, False, shape())
