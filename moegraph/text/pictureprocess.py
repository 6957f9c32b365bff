"""Child process that decodes and encodes pictures, which are untrusted input from clients.

A crash ends only this process, the kernel limits its memory, and it cannot write files. llama.cpp's
libmtmd does the work.

Messages: In: the arguments of `_Encoder`, and `more_bytes`, memory beyond what it has once it is
ready, in JSON; then the file of each picture. Out: `[]`, when it is ready; then for each picture
its parts, `{"tokens": [...]}` or `{"n": ..., "n_positions": ..., "places": [[...], [...], [...]]}`,
and rows F32 of each part of the second kind. In place of a list comes `{"error": ...}`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import ConfigError, MoegraphError, RequestError
from ..ggml import lib
from .tokenizer import load_llama

Parts = list[dict[str, Any]]
_ERROR = 4  # a level of ggml's log


class _Encoder:
    """The encoder. model: the first file of the model. n_embd: numbers of a row."""

    def __init__(
        self, model: str, mmproj: str, n_embd: int, n_threads: int, max_pixels: int, device: str
    ) -> None:
        llama = load_llama()
        package = llama.__name__.rpartition(".")[0]
        sys.modules |= {"llama_cpp": sys.modules[package], "llama_cpp.llama_cpp": llama}
        os.environ["MTMD_CPP_LIB"] = str(lib.library_dir())
        try:
            self._lib: Any = importlib.import_module("llama_cpp.mtmd_cpp")
        except (ImportError, OSError, AttributeError) as error:
            raise ConfigError(f"this build reads no pictures: {error}") from error
        self._row_bytes, self._max_pixels, self._line = 4 * n_embd, max_pixels, ""
        found = lib.devices(with_cuda=device != "cpu")
        named = {lib.ffi.string(lib.C.ggml_backend_dev_name(one)).decode(): one for one in found}
        self._log = llama.llama_log_callback(self._note)
        self._lib.mtmd_helper_log_set(self._log, None)
        llama.llama_log_set(self._log, None)
        params = llama.llama_model_default_params()
        params.no_alloc, params.load_mtp = True, False
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE
        params.devices = ctypes.cast((ctypes.c_void_p * 1)(), ctypes.c_void_p)  # no contexts
        text = llama.llama_model_load_from_file(os.fsencode(model), params)
        params = self._lib.mtmd_context_params_default()
        params.device = int(lib.ffi.cast("intptr_t", named[device.upper().replace(":", "")]))
        params.use_gpu, params.warmup, params.print_timings = device != "cpu", False, False
        params.n_threads, params.flash_attn_type = n_threads, 1
        self._ctx = text and self._lib.mtmd_init_from_file(os.fsencode(mmproj), text, params)
        if not (self._ctx and self._lib.mtmd_support_vision(self._ctx)):
            raise ConfigError(f"{mmproj}: not a picture encoder of this model: {self._line}")

    def _note(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR and (line := text.decode(errors="replace").strip()):
            self._line = line

    def encode(self, data: bytes) -> tuple[Parts, list[bytes]]:
        """Return the parts of a picture, and the rows of those that have any."""
        lib, image = self._lib, (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        sides = (ctypes.c_int * 3)()
        places = [ctypes.byref(sides, 4 * i) for i in range(3)]
        if not lib._libmtmd.stbi_info_from_memory(image, len(data), *places):
            raise RequestError("neither JPEG, PNG, GIF nor BMP, or damaged")
        if sides[0] * sides[1] > self._max_pixels:
            raise RequestError(
                f"{sides[0]} x {sides[1]} pixels; at most {self._max_pixels} in all are allowed"
            )
        bitmap = lib.mtmd_helper_bitmap_init_from_buf(self._ctx, image, len(data), False)
        chunks, marker = lib.mtmd_input_chunks_init(), lib.mtmd_default_marker()
        try:
            text = lib.mtmd_input_text(marker, len(marker), False, True)
            given = (ctypes.c_void_p * 1)(bitmap)
            if not bitmap or lib.mtmd_tokenize(self._ctx, chunks, ctypes.byref(text), given, 1):
                raise RequestError(f"it cannot be decoded: {self._line}")
            return self._parts(chunks)
        finally:
            lib.mtmd_input_chunks_free(chunks)
            lib.mtmd_bitmap_free(bitmap)

    def _parts(self, chunks: Any) -> tuple[Parts, list[bytes]]:
        lib, parts, rows = self._lib, Parts(), list[bytes]()
        for at in range(lib.mtmd_input_chunks_size(chunks)):
            chunk = lib.mtmd_input_chunks_get(chunks, at)
            n = ctypes.c_size_t(lib.mtmd_input_chunk_get_n_tokens(chunk))
            if lib.mtmd_input_chunk_get_type(chunk) == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                tokens = lib.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                parts.append({"tokens": tokens[: n.value]})
                continue
            if lib.mtmd_encode_chunk(self._ctx, chunk):
                raise RequestError(f"it cannot be encoded: {self._line}")
            found = lib.mtmd_get_output_embd(self._ctx)
            rows.append(ctypes.string_at(found, n.value * self._row_bytes))
            image = lib.mtmd_input_chunk_get_tokens_image(chunk)
            each = [lib.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n.value)]
            places = [[one.t for one in each], [one.y for one in each], [one.x for one in each]]
            n_positions = lib.mtmd_input_chunk_get_n_pos(chunk)
            parts.append({"n": n.value, "n_positions": n_positions, "places": places})
        return parts, rows


def _end_with(pipe: Connection) -> None:
    """End the process with the other end of its pipe, also while it reads a picture."""
    ends = select.poll()
    ends.register(pipe.fileno(), 0)  # the end of the other end is told all the same
    ends.poll()
    os._exit(0)


def main() -> None:
    """Serve pictures until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()

    def send(answer: object) -> None:
        pipe.send_bytes(json.dumps(answer).encode())

    asked = json.loads(pipe.recv_bytes())
    n_bytes = asked.pop("more_bytes")
    try:
        encoder = _Encoder(**asked)
        if asked["device"] != "cpu":  # kernels and pools take address space, before the limit
            encoder.encode(b"P6 64 64 255\n" + bytes(3 * 64 * 64))
        with open("/proc/self/statm") as file:
            n_bytes += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(what, (0, 0))
        send([])
    except MoegraphError as error:
        send({"error": str(error)})
        return
    with suppress(EOFError):
        while data := pipe.recv_bytes():
            try:
                parts, rows = encoder.encode(data)
                send(parts)
                for one in rows:
                    pipe.send_bytes(one)
            except (RequestError, MemoryError) as error:
                send({"error": str(error) or "it takes too much memory"})


if __name__ == "__main__":
    main()
