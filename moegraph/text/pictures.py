"""Pictures of clients: read from where they may be, and encoded in a process with limits."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..arch import ModelFile
from ..errors import ConfigError, ModelFileError, MoegraphError, RequestError, ServiceClosed
from ..gguf.hubnames import mmproj_for, quant_of
from ..pictures import Picture
from ..units import GiB, MiB
from .recent import Recent

# Of one picture: bytes of its file, pixels, and seconds until its rows are there. Of a request:
# pictures.
MAX_BYTES, MAX_PIXELS, MAX_SECONDS, MAX_PICTURES = 32 * MiB, 1 << 26, 300.0, 64
# Memory of the process beyond the encoder's weights; bytes of its messages; bytes of rows that are
# remembered: each turn of a conversation sends its pictures again.
_MAX_MEMORY, _MAX_MESSAGE, _MAX_KNOWN = 8 * GiB, 1 * GiB, 1 * GiB
# What a model reads of a picture: tokens, and the picture.
Shown = list[list[int] | Picture]


class PictureReader:
    """Encodes pictures with the encoder in a file (mmproj); close it when done.

    Its process starts with the first picture. Any thread may call it; one picture is encoded at a
    time.
    """

    def __init__(
        self, model: ModelFile, path: Path, n_threads: int, media: Path | None = None,
        max_seconds: float = MAX_SECONDS, device: str = "cpu",
    ) -> None:  # fmt: skip
        """media: the folder whose files clients may name; None: none. device: cpu or cuda:N.

        Raises:
            ConfigError: the model reads no pictures, or the file cannot be read.
        """
        if not model.hparams.rope_sections:
            raise ConfigError(
                f"--mmproj: moegraph shows no pictures to {model.hparams.name} models"
            )
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the encoder: {error.strerror}") from error
        self._media, self._max_seconds = media and media.resolve(), max_seconds
        self._key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} ".encode()
        self._asked = {
            "model": str(model.path), "mmproj": str(path), "n_embd": model.hparams.n_embd,
            "n_threads": n_threads, "max_pixels": MAX_PIXELS, "more_bytes": _MAX_MEMORY,
            "device": device,
        }  # fmt: skip
        self._known: Recent[bytes, Shown] = Recent(_MAX_KNOWN)
        self._lock = threading.Lock()
        self._is_closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def show(self, shown: dict[str, Shown], url: object, where: str) -> str:
        """Add what a model reads of a picture to shown; return the text that stands for it there.

        It is random, so that no text of a client is taken for it.
        """
        if len(shown) >= MAX_PICTURES:
            raise RequestError(f"{where}: more than {MAX_PICTURES} pictures")
        mark = f"[picture {secrets.token_hex(8)}]"
        shown[mark] = self.encode(self.data(url, where), where)
        return mark

    def data(self, url: object, where: str) -> bytes:
        """Return the file of a picture that a client names: a data URI, or a file in `media`."""
        kind, _, rest = url.partition(",") if isinstance(url, str) else ("", "", "")
        if kind.startswith("data:") and kind.endswith(";base64"):
            try:
                return base64.b64decode(rest, validate=True)
            except ValueError as error:
                raise RequestError(f"{where}: not base64: {error}") from error
        if kind.startswith("file://") and self._media:
            path = (self._media / str(url).removeprefix("file://").lstrip("/")).resolve()
            if path.is_relative_to(self._media) and path.is_file():
                return read_picture(path)
            raise RequestError(f"{where}: no file under --media-path")
        raise RequestError(f"{where}: no address is fetched; send data:image/...;base64,...")

    def encode(self, data: bytes, where: str = "picture") -> Shown:
        """Return what a model reads of a picture.

        Raises:
            RequestError: it is too large, damaged, or not of a known kind.
            ModelFileError: the encoder does not work.
            ServiceClosed: `close` was called.
        """
        if not 0 < len(data) <= MAX_BYTES:
            raise RequestError(f"{where}: {len(data)} bytes; allowed: 1 to {MAX_BYTES}")
        key = hashlib.sha256(self._key + data).digest()
        with self._lock:
            if self._is_closed:
                raise ServiceClosed("pictures are read no more")
            found = self._known.get(key)
            if found is None:
                try:
                    found = self._encoded(data, key)
                except MoegraphError as error:
                    if self._is_closed:
                        raise ServiceClosed("pictures are read no more") from error
                    if not isinstance(error, RequestError):
                        raise
                    raise RequestError(f"{where}: {error}") from error
                except BaseException:
                    self._kill()  # its next answer would belong to this picture
                    raise
                rows = [one.rows.nbytes for one in found if isinstance(one, Picture)]
                self._known.put(key, found, sum(rows))
            return found

    def _encoded(self, data: bytes, key: bytes) -> Shown:
        if self._pipe is None:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", f"{__package__}.pictureprocess", str(theirs.fileno())]
            needed = ("PATH", "PYTHON", "LD_", "MOEGRAPH_CPU_", "CUDA_")  # others may be keys
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                env={name: os.environ[name] for name in os.environ if name.startswith(needed)},
            )  # fmt: skip
            theirs.close()
            self._pipe = ours
            try:
                self._ask(json.dumps(self._asked).encode())
            except RequestError as error:
                self._kill()
                raise ModelFileError(f"--mmproj: {error}") from error
        found: Shown = []
        for part in self._ask(data):
            if "tokens" in part:
                found.append(list(part["tokens"]))
                continue
            rows = np.frombuffer(self._receive(), np.float32).reshape(part["n"], -1)
            if not np.isfinite(rows).all():
                self._kill()  # there may be more parts
                raise RequestError("its rows are not finite")
            places = np.array(part["places"], np.int32)
            found.append(Picture(key, rows, places, part["n_positions"]))
        return found

    def _ask(self, message: bytes) -> list[dict[str, Any]]:
        """Send a message; return the answer, or raise the error that it is."""
        answer = json.loads(self._receive(message))
        if isinstance(answer, dict):
            raise RequestError(answer["error"])
        return list(answer)

    def _receive(self, message: bytes | None = None) -> bytes:
        """Return the next message of the process, which has a limited time for it."""
        why = "ended"
        try:
            if self._pipe and message is not None:
                self._pipe.send_bytes(message)
            if self._pipe and self._pipe.poll(self._max_seconds):
                return self._pipe.recv_bytes(_MAX_MESSAGE)
            why = f"took more than {self._max_seconds:g} s"
        except (EOFError, OSError):
            pass
        self._kill()
        raise RequestError(f"the process that reads it {why}")

    def _kill(self) -> None:
        if self._child and self._pipe:
            self._child.kill()
            self._child.wait()
            self._pipe.close()
        self._child = self._pipe = None

    def close(self) -> None:
        """End the process, also while it reads a picture; a second call does nothing."""
        self._is_closed, child = True, self._child
        if child:
            child.kill()
        with self._lock:
            self._kill()


def read_picture(path: Path) -> bytes:
    """Return the bytes of a file, at most one more than are allowed."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot read the picture: {error.strerror}") from error


def find_mmproj(model: Path) -> Path | None:
    """Return the picture encoder beside a model file; None without one.

    Of several that differ only in their types, it is that with the bits closest to the model's.
    """
    found = [path.name for path in model.parent.glob("*.gguf") if "mmproj" in path.name.lower()]
    kinds = {Path(name).stem.upper().removesuffix(quant_of(name) or "") for name in found}
    name = mmproj_for(model.name, found) if len(kinds) == 1 else None
    return model.parent / name if name else None
