"""Entry point of ``moegraph`` and ``python -m moegraph``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C is one line even while modules are still being imported."""
    try:
        from .cli import main as program
        from .cli.interrupt import let_interrupts_pass_callbacks

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
        # What is left is tearing down; a Ctrl-C in there could only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave() -> NoReturn:
    """Exit with 130.

    An interrupt that has passed through exec() of a string, as in dataclasses, makes Python end
    by a signal later on, even when it was caught.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
