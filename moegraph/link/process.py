"""Python processes of ours that inherit one socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def start_python(
    module: str, job: str, sock: socket.socket, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m module job` in a session of its own; it inherits one socket.

    A session of its own: Ctrl-C on the terminal does not reach it.
    """
    # the same modules as here, also in a checkout that is not installed
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module, job],
        pass_fds=(sock.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        cwd="/",  # Python looks for modules there first
    )
