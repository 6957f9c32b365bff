"""`moegraph daemon`: requests as lines on stdin, tokens on a file descriptor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click

from . import models, options, ui
from .models import target_argument
from .options import Command

# A line names a few files; this is no length that one has by intention.
_MAX_LINE = 64 << 10


@click.command("daemon", cls=Command)
@target_argument
@click.option(
    "--stream-fd", type=click.INT, metavar="FD",
    help="Write tokens to this file descriptor, as little-endian 32-bit integers, and -1 at the "
    "end of each request.",
)  # fmt: skip
@click.option(
    "--stream-tagged", is_flag=True,
    help="Write frames of three integers instead: -2, the number of the request, and the token, "
    "-4 (more can be asked for) or -1 (the end). START and CONTINUE need it.",
)  # fmt: skip
@click.option(
    "-np", "--parallel", "--target-cache-slots", "n_slots", type=click.IntRange(1, 256), default=1,
    metavar="N",
    help="Requests that can be under way at a time; they share the context (-c).",
)  # fmt: skip
@options.engine_options("context_shift", "n_keep", "mmproj_device")
def daemon(
    target: str, stream_fd: int | None, stream_tagged: bool, n_slots: int, **given: Any
) -> None:
    """Answer requests for the model TARGET that programs write as lines to stdin.

    Prompts are files of raw little-endian 32-bit token ids. Replies are lines on stdout that begin
    with ok or err; "[daemon] ready" comes first. docs/daemon.md lists the lines.

    \b
    Examples:
      moegraph daemon model.gguf --stream-fd 3 3> tokens.bin
      moegraph daemon model.gguf --stream-fd 3 --stream-tagged -np 4 3> frames.bin
    """
    from ..engine.service import Service
    from ..server.daemon import Daemon, Frames

    frames = Frames(stream_fd, stream_tagged)
    config = replace(options.build_config(given), n_seq=n_slots).validate()
    with ExitStack() as stack:
        model = stack.enter_context(models.open_header(target, config.device))
        engine = stack.enter_context(models.load_engine(model, config, text=True))
        stack.enter_context(models.saving_profile(engine))
        service = Service(engine)
        stack.callback(service.close)
        service.start()
        daemon = Daemon(service, _say, frames, n_slots, models.has_vocabulary(model))
        stack.callback(daemon.close)
        daemon.greet()
        for line in _lines():
            if not daemon.obey(line):
                break


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _lines() -> Iterator[str]:
    """Yield the lines of stdin; names of files may have any bytes."""
    source = sys.stdin.buffer
    while data := source.readline(_MAX_LINE):
        if len(data) == _MAX_LINE and not data.endswith(b"\n"):
            ui.note(f"warning: a line of more than {_MAX_LINE} bytes was dropped")
            while (rest := source.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            _say("err bad_args the line is too long")
            continue
        yield data.decode(errors="surrogateescape")
