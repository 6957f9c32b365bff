"""Models of a hub: found in huggingface_hub's cache, or downloaded into it.

The names, the cache's layout, tokens and settings of the environment (HF_ENDPOINT, HF_TOKEN,
HF_HUB_CACHE, HF_HUB_OFFLINE) are huggingface_hub's. A download that was cut goes on where it
stopped, also in another process, and a file enters the cache only when its checksum is right.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import ConfigError, ModelFileError, MoegraphError
from ..units import format_bytes
from .hubnames import DEFAULT_QUANT, HubName, choose_files, fitting, mmproj_for

if TYPE_CHECKING:
    from ..events import Progress

Say = Callable[[str], None]
Room = Callable[[], int]
_CHUNK = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}", re.A)
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}", re.A)


@dataclass(frozen=True)
class _Remote:
    """A file on the hub. etag: its checksum. commit: the revision of the repository."""

    file: str
    etag: str
    n_bytes: int
    commit: str
    blob: Path


def get_model(
    name: HubName, progress: Progress | None = None, say: Say | None = None,
    room: Room | None = None,
) -> Path:  # fmt: skip
    """Return the path of a model's first file: from the cache if it is there, else downloaded.

    The hub is not asked if the cache has the quantization that is wanted. progress: called with
    ("download" or "checksum", bytes done, bytes in total). say: called with lines for the user.
    room: tells the bytes of memory for a model; where no quantization is wanted, one that fits is
    taken, or the only one that the cache has.
    """
    hub = _library()
    cached = _cached(hub, name, name.pick or DEFAULT_QUANT)
    if cached is None and room:
        cached = _cached(hub, name, name.pick)
    if cached is not None:
        return cached
    try:
        return download(name, progress, say, room=room)
    except _Unreachable as error:
        cached = _cached(hub, name, name.pick)
        if cached is None:
            raise
        if say:
            say(f"{error}; using {cached}")
        return cached


def download(
    name: HubName, progress: Progress | None = None, say: Say | None = None,
    verify: bool = False, room: Room | None = None,
) -> Path:  # fmt: skip
    """Bring a model's files in the cache up to date with the hub; return the path of the first.

    progress, say, room: as in `get_model`. verify: compare also the checksums of files that the
    cache has; a wrong one is removed and downloaded again.
    """
    hub = _library()
    progress, say = progress or (lambda *_: None), say or (lambda _: None)
    with _one_line_errors(hub, name):
        api = hub.HfApi(library_name="moegraph")
        # One request that the library does not repeat: without a network, the error comes at once.
        info = api.model_info(name.repo, files_metadata=room is not None)
        there = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if room and not name.pick:
            name, why = fitting(there, name, room())
            if why:
                say(why)
        return _fetch(hub, name, choose_files(there, name), progress, say, verify)


def get_mmproj(model: Path, repo: str, progress: Progress, say: Say) -> Path | None:
    """Return the picture encoder in the repository of a cached model, at the model's revision.

    It is downloaded if the cache lacks it. None: there is none, or say has told why it cannot be
    had. progress, say: as in `get_model`.
    """
    hub, name = _library(), HubName(repo)
    snapshots = _storage(hub, repo) / "snapshots"
    commit, *parts = model.relative_to(snapshots).parts
    file = "/".join(parts)
    if cached := mmproj_for(file, _files(snapshots / commit)):
        return snapshots / commit / cached
    try:
        with _one_line_errors(hub, name):
            info = hub.HfApi(library_name="moegraph").model_info(repo, revision=commit)
            found = mmproj_for(file, (sibling.rfilename for sibling in info.siblings or ()))
            return _fetch(hub, name, (found,), progress, say, at=commit) if found else None
    except ModelFileError as error:
        say(f"no pictures: {error}")
        return None


def _fetch(
    hub: Any, name: HubName, files: Iterable[str], progress: Progress, say: Say,
    verify: bool = False, at: str | None = None,
) -> Path:  # fmt: skip
    """Bring files of a revision (default: the newest) into the cache; return the first one's path.

    verify: as in `download`.
    """
    remotes = [_look_up(hub, name.repo, file, at) for file in files]
    if verify:
        for remote in remotes:
            if remote.blob.is_file() and not _is_right(remote.blob, remote.etag, progress):
                say(f"{remote.file} in the cache is damaged; downloading it again")
                remote.blob.unlink()
    missing = [remote for remote in remotes if not remote.blob.is_file()]
    if missing:
        _announce(missing, name, say)
    _download(hub, name.repo, missing, progress, say)
    paths = [_enter(hub, name, remote, at) for remote in remotes]
    return paths[0]


class _Unreachable(ModelFileError):
    """The hub gives no answer, or is not to be asked."""


def _library() -> Any:
    """Return the module huggingface_hub, whose types its versions change."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors, file_download, utils  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "models of a hub need the package huggingface_hub, which is not installed; "
            "pip install huggingface_hub, or give the path of a file"
        ) from error
    # Its retries and hints are not for our users; what fails for good is raised.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    hub: Any = huggingface_hub
    hub.utils.disable_progress_bars()
    return hub


def _cached(hub: Any, name: HubName, pick: str | None) -> Path | None:
    """Return the first file of a model in the cache, None if it is not there."""
    folder = _storage(hub, name.repo)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        snapshot = folder / "snapshots" / commit
        return snapshot / choose_files(_files(snapshot), HubName(name.repo, pick))[0]
    except (OSError, ValueError, ModelFileError):
        return None


def _files(snapshot: Path) -> list[str]:
    return [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]


def cache_folder() -> Path:
    """Return the folder of all downloaded models; it may not be there yet."""
    return Path(_library().constants.HF_HUB_CACHE)


def _storage(hub: Any, repo: str) -> Path:
    folder: str = hub.file_download.repo_folder_name(repo_id=repo, repo_type="model")
    return Path(hub.constants.HF_HUB_CACHE) / folder


def _look_up(hub: Any, repo: str, file: str, at: str | None) -> _Remote:
    found = hub.get_hf_file_metadata(hub.hf_hub_url(repo, file, revision=at))
    if not (found.etag and found.size is not None and found.commit_hash):
        raise ModelFileError(f"{repo}: the hub tells no size or checksum of {file}")
    if not (_SHA256.fullmatch(found.etag) or _GIT_SHA1.fullmatch(found.etag)):
        raise ModelFileError(f"{repo}: the checksum of {file} has an unknown form: {found.etag}")
    blob = _storage(hub, repo) / "blobs" / found.etag
    return _Remote(file, found.etag, found.size, found.commit_hash, blob)


def _announce(missing: list[_Remote], name: HubName, say: Say) -> None:
    """Say what is about to be downloaded, and refuse it if the disk is too small."""
    folder = missing[0].blob.parent
    folder.mkdir(parents=True, exist_ok=True)
    held = sum(p.stat().st_size for r in missing if (p := _partial(r)).is_file())
    needed = sum(r.n_bytes for r in missing) - held
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelFileError(
            f"{name}: {format_bytes(needed)} to download, and {folder} has {format_bytes(free)} "
            "free; free some, or set HF_HUB_CACHE to another folder"
        )
    what = missing[0].file if len(missing) == 1 else f"{len(missing)} parts of {missing[0].file}"
    rest = f", {format_bytes(held)} of it are there" if held else ""
    total = format_bytes(needed + held)
    say(f"downloading {what} of {name.repo} ({total}{rest}) to {folder.parent}")


def _download(hub: Any, repo: str, missing: list[_Remote], progress: Progress, say: Say) -> None:
    total, done = sum(r.n_bytes for r in missing), 0
    for remote in missing:
        before = done

        def report(stage: str, n: int, of: int, before: int = before) -> None:
            is_download = stage == "download"
            progress(stage, before + n if is_download else n, total if is_download else of)

        _bring(hub, repo, remote, report, say)
        done += remote.n_bytes


def _partial(remote: _Remote) -> Path:
    return remote.blob.with_name(f"{remote.etag}.moegraph-part")


def _bring(hub: Any, repo: str, remote: _Remote, progress: Progress, say: Say) -> None:
    """Download a file, or the rest of it, and move it into the cache if its checksum is right."""
    partial = _partial(remote)
    with _locked(partial, say) as file:
        if remote.blob.is_file():  # another process was faster
            partial.unlink(missing_ok=True)
            return
        if file.seek(0, os.SEEK_END) > remote.n_bytes:
            file.truncate(0)
        _append(hub, repo, remote, file, progress)
        file.flush()
        if not _is_right(partial, remote.etag, progress):
            partial.unlink()
            raise ModelFileError(
                f"{repo}: the checksum of {remote.file} is wrong after the download; "
                "nothing of it was kept; try again"
            )
        os.fsync(file.fileno())
        partial.rename(remote.blob)


def _append(hub: Any, repo: str, remote: _Remote, file: BinaryIO, progress: Progress) -> None:
    """Download what a file lacks; go on after an error as long as each try brings something."""
    url = hub.hf_hub_url(repo, remote.file, revision=remote.commit)
    headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
    n_held = file.seek(0, os.SEEK_END)
    while True:
        target = _Metered(file, remote.n_bytes, progress)
        try:
            hub.file_download.http_get(
                url, target, resume_size=n_held, headers=headers, expected_size=remote.n_bytes
            )
            return
        except Exception:  # the errors of a transfer are of other libraries, by version
            before, n_held = n_held, file.seek(0, os.SEEK_END)
            if n_held <= before:
                raise


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[BinaryIO]:
    """Open a file to append to it, alone among all processes; wait until it is free."""
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is downloading this file; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                is_same = False
            if is_same:
                yield file
                return
        # Whoever had it has moved or removed it.


class _Metered:
    """A file to which http_get appends, and which tells how much of it there is."""

    def __init__(self, file: BinaryIO, n_bytes: int, progress: Progress) -> None:
        self._file, self._n_bytes, self._progress = file, n_bytes, progress
        self._report()

    def _report(self) -> None:
        self._progress("download", self._file.tell(), self._n_bytes)

    def write(self, data: bytes) -> int:
        n = self._file.write(data)
        self._report()
        return n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _is_right(path: Path, etag: str, progress: Progress) -> bool:
    """Return whether a file has the checksum that the hub tells: SHA-256, or git's of a blob."""
    n_bytes, done = path.stat().st_size, 0
    if _SHA256.fullmatch(etag):
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % n_bytes, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("checksum", done, n_bytes)
    return digest.hexdigest() == etag


def _enter(hub: Any, name: HubName, remote: _Remote, at: str | None) -> Path:
    """Give a downloaded file its name in the cache; return its path."""
    path = Path(hub.hf_hub_download(name.repo, remote.file, revision=at))
    if path.is_symlink() and path.resolve().name != remote.etag:
        raise ModelFileError(f"{name}: the repository changed during the download; try again")
    return path


@contextmanager
def _one_line_errors(hub: Any, name: HubName) -> Iterator[None]:
    """Turn the library's errors into lines for the user."""
    try:
        yield
    except MoegraphError:
        raise
    except Exception as error:
        raise _error_of(hub, name, error) from error


def _error_of(hub: Any, name: HubName, error: Exception) -> ModelFileError:
    errors, host = hub.errors, hub.constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", None)
    token = "check HF_TOKEN" if hub.get_token() else "set HF_TOKEN to your token"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _Unreachable(f"{name}: not in the cache, and HF_HUB_OFFLINE forbids to download it")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return ModelFileError(
            f"{name}: access is restricted; accept the terms at {host}/{name.repo}, and {token}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelFileError(
            f"{name}: {host} has no such repository, or it is private; check the name, and {token}"
        )
    if status == 401:
        return ModelFileError(f"{name}: {host} refuses the token; {token}")
    if isinstance(error, errors.EntryNotFoundError) or status == 404:
        return ModelFileError(f"{name}: {host} no longer has the file; try again")
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ENOTDIR,
    ):  # fmt: skip
        return ModelFileError(f"{error.filename or name}: {error.strerror}")
    why = f"status {status}" if status else f"{type(error).__name__}: {error}"
    return _Unreachable(f"{name}: cannot download from {host} ({why}); run it again to go on")
