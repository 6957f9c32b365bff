"""Child process that renders chat templates; a template is untrusted input of a model file.

Jinja's sandbox keeps a template from reaching Python objects, but not from running for ever or
filling the memory: one expression such as ``'a' * 10**9`` cannot be interrupted. So rendering
has a process of its own, with limits that the kernel enforces, and nothing to lose.

Protocol: one JSON value a line. In: limits, template; then variables, one line a rendering.
Out: ``{"ready": true}``, then ``{"text": ...}`` a rendering. In place of any of them may stand
``{"error": ..., "kind": "syntax" | "refused" | "failed" | "limit"}``. SIGALRM kills a rendering
that takes too long. This file is run as a script and imports nothing of moegraph.
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
    """A template called raise_exception: it does not accept the messages."""


class GenerationTag(jinja2.ext.Extension):
    """Accept ``{% generation %}``, which marks text for training, and render what it contains."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def build_environment() -> jinja2.Environment:
    """Return the environment that templates on the Hugging Face hub are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


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
    """Return the text, or why there is none."""
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
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve renderings of one template until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
    try:
        template = build_environment().from_string(json.loads(sys.stdin.readline()))
    except jinja2.TemplateSyntaxError as error:
        _send(_error("syntax", f"line {error.lineno}: {error.message}"))
        return
    except Exception as error:  # noqa: BLE001 - constant folding runs expressions while compiling
        _send(_error("syntax", f"{type(error).__name__}: {error}"))
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
        answer = render(template, json.loads(line), limits["chars"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answer)


if __name__ == "__main__":
    main()
