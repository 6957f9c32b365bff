"""Entry point of ``moegraph`` and ``python -m moegraph``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C is one line even while modules are still being imported."""
    try:
        from .cli import main as program
        from .cli.interrupt import let_interrupts_pass_callbacks

        let_interrupts_pass_callbacks()
        program()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    finally:
        # What is left is tearing down; a Ctrl-C in there could only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
