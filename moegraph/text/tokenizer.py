"""Text to token ids and back, through the vocabulary code of llama.cpp.

llama-cpp-python loads moegraph's own libraries (a process can have only one ggml) and reads only
the vocabulary of the model file.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..closing import Closable
from ..errors import ConfigError, InternalError, ModelFileError, RequestError
from ..lazypackage import import_lazily
from ..units import MiB, format_bytes

# llama.cpp counts tokens in 32 bits; a prompt far shorter than that is already a mistake.
MAX_PROMPT_BYTES = 16 * MiB
# A word costs the tokenizer up to a hundred times its size: longer texts have to take turns.
_LARGE_BYTES = 1 * MiB
# No token of a byte-level BPE is nearly as long; a longer one means a broken vocabulary.
MAX_PIECE_BYTES = 64 * 1024

_ERROR_LEVEL = 4
_CONTINUE_LEVEL = 5


class Tokenizer(Closable):
    """The vocabulary of one model file; close it when done, or use it in a with statement.

    source: an open model, or a path. From an open model, the file that was checked is read, even if
    another file is at its path by now. llama.cpp ends the process on a vocabulary that `open_model`
    would refuse, so pass a path only if other users cannot write there.

    Raises:
        ModelFileError: the file has no vocabulary, was written to, or llama.cpp refuses it.
        ConfigError: llama-cpp-python is not installed.
    """

    def __init__(self, source: ModelFile | str | os.PathLike[str]) -> None:
        self._model: Any = None
        self._shown: frozenset[int] = frozenset()
        self._large = threading.Lock()
        self._lib = load_llama()
        if isinstance(source, ModelFile):
            source.check_unchanged()
            paths, opened = source.paths, source.opened_paths()
        else:
            paths, opened = (Path(source),), [os.fspath(source)]
        self.path = paths[0]
        with _captured_log(self._lib) as messages:
            params = self._lib.llama_model_default_params()
            params.vocab_only = True
            names = (ctypes.c_char_p * len(opened))(*map(os.fsencode, opened))
            self._model = self._lib.llama_model_load_from_splits(names, len(opened), params)
        if not self._model:
            reason = messages[0] if messages else "no reason given"
            for name, path in zip(opened, paths):
                reason = reason.replace(name, str(path))
            raise ModelFileError(f"{self.path}: llama.cpp cannot read the vocabulary: {reason}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._vocab)
        if self.n_vocab == 0:
            self.close()
            raise ModelFileError(f"{self.path}: the file has no vocabulary; use token ids")

    def close(self) -> None:
        """Free the vocabulary; a second call does nothing."""
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = self._vocab = None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of text.

        add_special: add BOS and EOS if the model asks for them.
        parse_special: read control tokens such as ``<|im_end|>`` as tokens and not as text.

        Raises:
            RequestError: the text is too long, or cannot be written as UTF-8.
        """
        data = _utf8(text)
        with self._large if len(data) > _LARGE_BYTES else nullcontext():
            return self._encode(data, add_special, parse_special)

    def _encode(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        # Enough for most text; an occasional second call is cheaper than 4 bytes per byte of text.
        n_tokens = -(len(data) // 2 + 16)
        # A negative result is minus the number of tokens that the text has.
        while n_tokens < 0:
            ids = array("i", bytes(4 * -n_tokens))
            n_tokens = self._lib.llama_tokenize(
                self._open_vocab(), data, len(data), ctypes.byref(ctypes.c_int32.from_buffer(ids)),
                len(ids), add_special, parse_special,
            )  # fmt: skip
            if n_tokens < -MAX_PROMPT_BYTES - 2:
                raise InternalError(f"llama_tokenize asks for room for {-n_tokens} tokens")
        return ids[:n_tokens].tolist()

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token; none for a control token unless special or `show` says so.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise RequestError(f"token id {token}; the vocabulary has ids 0 to {self.n_vocab - 1}")
        size, special = 64, special or token in self._shown
        while size <= MAX_PIECE_BYTES:
            buffer = ctypes.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self._open_vocab(), token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n
        raise ModelFileError(
            f"{self.path}: token {token} has {size} bytes; at most {MAX_PIECE_BYTES} are allowed"
        )

    def show(self, tokens: Iterable[int]) -> None:
        """Have these control tokens be text from now on: tags that a reader of answers must see."""
        self._shown |= frozenset(tokens)

    def is_special(self, token: int) -> bool:
        """Return whether a token is a control token, or a tag such as ``<tool_call>``.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise RequestError(f"token id {token}; the vocabulary has ids 0 to {self.n_vocab - 1}")
        attr = self._lib.llama_vocab_get_attr(self._open_vocab(), token)
        if attr & self._lib.LLAMA_TOKEN_ATTR_USER_DEFINED:
            piece = self.piece(token, special=True)
            return piece.startswith(b"<") and piece.endswith(b">")
        return bool(attr & self._lib.LLAMA_TOKEN_ATTR_CONTROL)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special) for token in ids).decode(errors="replace")

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Return the ids that end a generation (end of text, of turn, of message)."""
        from ..ggml.lib import C, ffi

        is_eog = ctypes.cast(self._lib.llama_vocab_is_eog, ctypes.c_void_p).value
        found = ffi.new("int32_t[]", self.n_vocab)
        n = C.mg_ids_where(
            ffi.cast("bool (*)(const void *, int32_t)", is_eog),
            ffi.cast("void *", self._open_vocab()),
            self.n_vocab,
            found,
        )
        return frozenset(found[0:n])

    @property
    def bos(self) -> int | None:
        """Return the id that begins a text, if the model has one."""
        return self._known(self._lib.llama_vocab_bos(self._open_vocab()))

    @property
    def eos(self) -> int | None:
        """Return the id that ends a text, if the model has one."""
        return self._known(self._lib.llama_vocab_eos(self._open_vocab()))

    def fim(self, name: str) -> int | None:
        """Return the id that marks a part of a text with a gap, if the model has one.

        name: "pre", "suf", "mid", "rep" or "sep".
        """
        return self._known(getattr(self._lib, f"llama_vocab_fim_{name}")(self._open_vocab()))

    def _known(self, token: int) -> int | None:
        return token if 0 <= token < self.n_vocab else None

    def _open_vocab(self) -> Any:
        # llama.cpp would dereference the null pointer.
        if not self._model:
            raise InternalError(f"the tokenizer of {self.path} is closed")
        return self._vocab


def open_soon(model: ModelFile) -> Future[Tokenizer]:
    """Begin to open the tokenizer of a model; meanwhile the weights can be loaded.

    llama.cpp needs about half a second for a vocabulary of 250,000 tokens. The result has the
    errors of `Tokenizer`; the model file must stay open until then.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="moegraph-vocabulary")
    begun = pool.submit(_open, model)
    pool.shutdown(wait=False)  # the thread ends with its work
    return begun


def _open(model: ModelFile) -> Tokenizer:
    tokenizer = Tokenizer(model)
    _ = tokenizer.eog_ids  # asked for before the first token
    return tokenizer


def _utf8(text: str) -> bytes:
    # A character has at least one byte: refuse a long text before encoding it.
    if len(text) <= MAX_PROMPT_BYTES:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            # what Python makes of a byte of the command line or of stdin that is not UTF-8
            is_byte = 0xDC80 <= code <= 0xDCFF
            what = f"byte 0x{code - 0xDC00:02x} is not UTF-8" if is_byte else "lone surrogate"
            raise RequestError(
                f"the prompt is not valid text: {what} (character {error.start})"
            ) from error
        if len(data) <= MAX_PROMPT_BYTES:
            return data
    raise RequestError(
        f"the prompt has {len(text)} characters; "
        f"at most {format_bytes(MAX_PROMPT_BYTES)} are allowed"
    )


def load_llama() -> ModuleType:
    """Import llama.cpp's bindings with our libraries, without the package around them.

    The package imports chat formats, Jinja and a cache on disk, which takes longer than to read the
    vocabulary of a small model, and it sends what ggml logs to stderr.
    """
    from ..ggml import lib

    with _environment("LLAMA_CPP_LIB_PATH", str(lib.library_dir())):
        try:
            if (lib.library_dir() / "llama_cpp").is_dir():  # a wheel brings what is used of them
                return importlib.import_module("moegraph.lib.llama_cpp.llama_cpp")
            import_lazily("llama_cpp")
            import llama_cpp.llama_cpp as llama
        except ImportError as error:
            raise ConfigError(
                "text needs llama-cpp-python: pip install llama-cpp-python==0.3.36 with "
                f"CMAKE_ARGS=-DLLAMA_BUILD=OFF, or give token ids ({error})"
            ) from error
        return llama


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable in the block only, so that the caller's child processes do not inherit it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


# ggml's log callback: level, text, user_data.
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@contextmanager
def _captured_log(llama: ModuleType) -> Iterator[list[str]]:
    """Collect llama.cpp's error lines in the block; afterwards its log stays silent.

    What other threads log meanwhile goes where ggml's log goes otherwise. Its callback is restored
    at the end: llama_log_set replaces it too.
    """
    from ..ggml import lib

    base = ctypes.CDLL(str(lib.library_dir() / "libggml-base.so"))
    before, user_data = ctypes.c_void_p(), ctypes.c_void_p()
    base.ggml_log_get(ctypes.byref(before), ctypes.byref(user_data))
    lines: list[str] = []
    is_error = False
    own = threading.get_ident()

    def collect(level: int, text: bytes, _: object) -> None:
        nonlocal is_error
        if threading.get_ident() != own:
            if before.value:
                _LOG(before.value)(level, text, user_data)
            return
        if level != _CONTINUE_LEVEL:
            is_error = level == _ERROR_LEVEL
        if is_error and (line := text.decode(errors="replace").strip()):
            lines.append(line)

    callback = llama.llama_log_callback(collect)
    llama.llama_log_set(callback, None)
    try:
        yield lines
    finally:
        llama.llama_log_set(_silent(llama), None)
        base.ggml_log_set(before, user_data)


@cache
def _silent(llama: ModuleType) -> Any:
    # Cached so that it is never freed: llama.cpp keeps the pointer. NULL would mean stderr.
    return llama.llama_log_callback(lambda level, text, user_data: None)


def read_ids(path: Path) -> npt.NDArray[np.int32]:
    """Return the ids in a file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot read token ids: {error.strerror}") from error
    if not data:
        raise RequestError(f"{path}: the file is empty; it must hold at least one token id")
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(f"{path}: larger than {format_bytes(MAX_PROMPT_BYTES)} of token ids")
    if len(data) % 4:
        raise RequestError(
            f"{path}: {len(data)} bytes is not a multiple of 4; "
            "token ids are little-endian 32-bit integers"
        )
    return np.frombuffer(data, dtype="<i4")


def require_ids_in_range(path: Path, ids: npt.NDArray[np.int32], n_vocab: int) -> None:
    """Refuse ids that the model does not have."""
    wrong = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if wrong.size:
        at = int(wrong[0])
        raise RequestError(
            f"{path}: token id {ids[at]} at position {at}; the model has ids 0 to {n_vocab - 1}"
        )
