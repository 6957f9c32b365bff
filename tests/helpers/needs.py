"""What a folder of tests needs of the machine, and why it may be missing.

Three things are reasons to skip: native libraries that are not built, no upstream to compare with,
no CUDA device. Anything else that keeps tests from running is a failure, an import error above all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from oracle.client import oracle_folder

NOT_BUILT = "the native libraries are not built; scripts/test builds them"


class Broken(Exception):
    """Something is there and does not work; the message is one line."""


def _native() -> str | None:
    spec = importlib.util.find_spec("moegraph")
    if spec is None or spec.origin is None:
        raise Broken("no package moegraph; run pytest from the root of the checkout")
    if not any((Path(spec.origin).parent / "ggml").glob("_native*.so")):
        return NOT_BUILT
    try:
        importlib.import_module("moegraph.engine.engine")
    except Exception as error:
        raise Broken(f"moegraph.engine.engine cannot be imported: {_describe(error)}") from error
    return None


def _regression() -> str | None:
    named = os.environ.get("MOEGRAPH_ORACLE")
    if named and not Path(named).is_dir():
        raise Broken(f"MOEGRAPH_ORACLE is {named}, which is no folder")
    if oracle_folder() is None:
        return "no unpatched llama.cpp to compare with; scripts/test makes it in .oracle"
    return _native()


def _cuda() -> str | None:
    reason = _native()
    if reason:
        return reason
    try:
        devices = importlib.import_module("moegraph.ggml.device").list_devices()
    except Exception as error:
        raise Broken(f"ggml cannot list its devices: {_describe(error)}") from error
    if any(device["kind"] == "cuda" for device in devices):
        return None
    return "no CUDA device: the libraries were built for the CPU, or the machine has no GPU"


# By the name of the folder under tests/.
NEEDS: dict[str, Callable[[], str | None]] = {
    "native": _native,
    "regression": _regression,
    "cuda": _cuda,
}


def missing(name: str) -> str | None:
    """Return why the tests of a folder cannot run on this machine, None if they can.

    Raises:
        Broken: they should be able to run and cannot.
    """
    return NEEDS[name]()


def _describe(error: BaseException) -> str:
    """Return an error as one line, with the place of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
