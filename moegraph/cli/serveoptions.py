"""The options of `moegraph serve` beyond those of the engine and of sampling."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from .command import Option

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _option(*flags: str, **described: Any) -> Callable[[Any], Any]:
    return click.option(*flags, cls=Option, group="Server", **described)


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*://[^/?#@\s]+)/?", re.I)


def _origins(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> tuple[str, ...]:
    """Return origins as browsers send them: in small letters, without a slash at the end."""
    found = []
    for text in ",".join(texts).split(",") if texts else ():
        match = _ORIGIN.fullmatch(text)
        if match is None and text != "*":
            raise click.BadParameter(
                f"{text!r}; write scheme and host, such as https://chat.example or "
                "http://localhost:3000"
            )
        found.append(match[1].lower() if match else text)
    return tuple(found)


_OPTIONS = (
    _option(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="Address to listen on.",
    ),
    _option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8080,
        metavar="N",
        help="Port to listen on; 0 takes a free one.",
    ),
    _option(
        "-np",
        "--parallel",
        "n_parallel",
        type=click.IntRange(1, 256),
        default=4,
        metavar="N",
        help="Most requests that are computed at a time; others wait. They share the context: "
        "one request may use all of it.",
    ),
    _option(
        "--queue",
        "n_waiting",
        type=click.IntRange(0, 65536),
        default=128,
        metavar="N",
        help="Most requests beyond those of -np; others are refused with status 429.",
    ),
    _option("-a", "--alias", metavar="NAME", help="Name of the model. Default: its file's name."),
    _option(
        "--api-key",
        "api_keys",
        multiple=True,
        metavar="KEY",
        help="Serve only clients that send this key; repeatable, or several with commas. Other "
        "users of the machine can read command lines: better use a file, or MOEGRAPH_API_KEY.",
    ),
    _option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File of keys, one in each line. SIGHUP makes the server read it again.",
    ),
    _option(
        "--insecure-no-key", is_flag=True, help="Let other machines use the server without a key."
    ),
    _option(
        "--alias-host",
        "alias_hosts",
        multiple=True,
        metavar="NAME",
        help="Also answer requests whose Host is this name; repeatable.",
    ),
    _option(
        "--cors-origin",
        "--cors-origins",
        "cors_origins",
        multiple=True,
        callback=_origins,
        metavar="ORIGIN",
        help="Let pages of this origin use the server, such as https://chat.example, or * for "
        "all; several with commas, or repeat it.",
    ),
    _option(
        "-n",
        "--predict",
        "--n-predict",
        "n_predict",
        type=click.INT,
        default=-1,
        metavar="N",
        help="Maximum number of tokens of an answer, if a request says nothing. -1: no limit.",
    ),
    _option(
        "--chat-template-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use this Jinja template instead of the model's own.",
    ),
    _option(
        "-rea",
        "--reasoning",
        type=click.Choice(["on", "off", "auto"]),
        default="auto",
        help="Ask for reasoning, or not, if a request says nothing. auto: the template's default.",
    ),
    _option(
        "--timeout",
        "deadline_s",
        type=click.FloatRange(0.001),
        metavar="SECONDS",
        help="End each answer after this time. Default: never.",
    ),
    _option(
        "--drain",
        "drain_s",
        type=click.FloatRange(0),
        default=30.0,
        metavar="SECONDS",
        help="How long requests may go on after SIGTERM or Ctrl-C.",
    ),
    _option(
        "--sleep-idle",
        "--sleep-idle-seconds",
        "sleep_s",
        type=click.FloatRange(0.001),
        metavar="SECONDS",
        help="Free the model's memory after this time without requests; the next one loads it "
        "again.",
    ),
    _option(
        "--cache-dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Folder for beginnings of prompts that --cache-ram has no room for, and for all of "
        "them when the server ends. Files of other models or settings there are not used.",
    ),
    _option(
        "--cache-disk",
        type=click.IntRange(1, 1 << 24),
        default=16384,
        metavar="MIB",
        help="Most disk space of --cache-dir, in MiB.",
    ),
    _option(
        "--cache-by-key",
        is_flag=True,
        help="Let each API key go on only from beginnings of prompts that it has sent itself.",
    ),
    _option(
        "--log-format",
        type=click.Choice(["text", "json", "off"]),
        default="text",
        help="Form of the log on stderr: a line for each request, without prompts and answers.",
    ),
)


def server_options(command: Decorated) -> Decorated:
    """Add the options of the server."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
