"""Entry point of ``moegraph`` and ``python -m moegraph``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C prints one line, also while modules are being imported."""
    try:
        from .cli import main as program
        from .interrupt import let_interrupts_pass_callbacks

        let_interrupts_pass_callbacks()
        program()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.stderr is not None:
            sys.stderr.write("interrupted\n")
        _leave()
    except SystemExit as leaving:
        if leaving.code == _INTERRUPTED:
            _leave()
        raise
    finally:
        # From here on Python only shuts down; a Ctrl-C now could only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave() -> NoReturn:
    """Exit with 130, without Python's own shutdown.

    If an interrupt passed through exec() of a string, as in dataclasses, Python would later end
    by a signal, although the interrupt was caught.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
