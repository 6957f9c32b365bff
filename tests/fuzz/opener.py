"""Open model files in child processes with memory and time limits, and say how each one ended.

A server that imports moegraph once: it reads one path a line from stdin, forks for each, and
answers with one JSON line: how the child ended (exit code or signal), what it reported, how much
memory and CPU time it took. A fork costs milliseconds where a new interpreter costs a third of a
second, and an abort, a hang or an explosion of memory still only takes the child.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from moegraph.arch import open_model
from moegraph.arch.draftfile import open_drafter
from moegraph.arch.summary import summarize
from moegraph.errors import MoegraphError

MEMORY_BYTES = 1 << 30
CPU_S = 10


def report(path: str) -> dict[str, Any]:
    """Open one file the way every command does, and touch everything that it promises.

    A name that begins with "draft" is that of a drafter.
    """
    try:
        if Path(path).name.startswith("draft"):
            _touch_drafter(path)
            return {"opened": True}
        with open_model(path) as model:
            summarize(model.hparams, model.tensors)
            for info in model.tensors.values():
                model.map(info)[:: max(1, info.nbytes - 1)].sum()
            for value in model.kv.values():
                str(value)
            return {"opened": True}
    except MoegraphError as error:
        return {
            "opened": False,
            "kind": type(error).__name__,
            "code": error.exit_code,
            "message": str(error),
        }


def _touch_drafter(path: str) -> None:
    with closing(open_drafter(path)) as draft:
        for il in range(draft.hparams.n_layer):
            draft.hparams.window(il)
        for info in draft.tensors.values():
            draft.source.read(info, np.empty(min(info.nbytes, 64), np.uint8))
        if "d2t" in draft.tensors:
            draft.d2t(1 << 20)


def child(path: str, pipe: int) -> None:
    """Run in the fork: set limits, open, report through the pipe."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        os.write(pipe, json.dumps(report(path)).encode())
    except BaseException as error:  # noqa: BLE001 - the parent judges it
        os.write(pipe, json.dumps({"crash": f"{type(error).__name__}: {error}"}).encode())
        code = 1
    os._exit(code)


def run(path: str) -> dict[str, Any]:
    """Fork, wait, and describe how the child ended."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        child(path, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": usage.ru_maxrss * 1024,
        **(json.loads(said) if said else {}),
    }


def main() -> None:
    """Answer one JSON line for each path on stdin."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
