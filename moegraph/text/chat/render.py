"""Child process that renders chat templates, which are untrusted input from a model file.

Jinja's sandbox keeps a template from reaching Python objects, but a template can still run for ever
or fill the memory: one expression such as ``'a' * 10**9`` cannot be interrupted. So templates are
rendered in this process, whose limits the kernel enforces and which holds nothing of value.

Protocol: one JSON value per line. In: limits, template; then the variables of each rendering.
Out: ``{"ready": true}``; then ``{"text": ...}`` for each rendering. Any of these may be replaced by
``{"error": ..., "kind": "syntax" | "refused" | "failed" | "limit"}``. SIGPROF ends the process if a
rendering takes too much CPU time. This file runs as a script and imports nothing of moegraph.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Refusal(Exception):
    """A template called raise_exception to refuse the messages."""


class GenerationTag(jinja2.ext.Extension):
    """Accept ``{% generation %}``, which marks text for training, and render its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def build_environment() -> jinja2.Environment:
    """Return a Jinja environment like the one that Hugging Face templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise Refusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not contain.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """Return {"text": ...}, or {"error": ..., "kind": ...} if rendering fails."""
    pieces, n_chars = [], 0
    try:
        for piece in template.generate(variables):
            n_chars += len(piece)
            if n_chars > max_chars:
                return _error("limit", f"more than {max_chars} characters")
            pieces.append(piece)
    except Refusal as refusal:
        return _error("refused", str(refusal))
    except MemoryError:
        return _error("limit", "too much memory")
    except RecursionError:
        return _error("limit", "too deep a recursion")
    except Exception as error:  # noqa: BLE001 - a template can raise whatever Python can
        return _error("failed", f"{type(error).__name__}: {error}")
    return {"text": "".join(pieces)}


def _error(kind: str, message: str) -> dict[str, str]:
    return {"kind": kind, "error": message[:500]}


def _send(answer: dict[str, Any]) -> None:
    with open(1, "w", closefd=False) as out:  # sys.stdout without a buffer would drop what a
        out.write(json.dumps(answer) + "\n")  # stopped process had not written yet


def main() -> None:
    """Serve renderings of one template until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
    try:
        template = build_environment().from_string(json.loads(sys.stdin.readline()))
    except jinja2.TemplateSyntaxError as error:
        _send(_error("syntax", f"line {error.lineno}: {error.message}"))
        return
    except Exception as error:  # noqa: BLE001 - constant folding runs expressions while compiling
        _send(_error("syntax", f"{type(error).__name__}: {error}"))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    _send({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        answer = render(template, json.loads(line), limits["chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answer)


if __name__ == "__main__":
    main()
