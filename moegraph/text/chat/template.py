"""Apply a model's chat template in a child process with limits on time, memory and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...closing import Closable
from ...errors import ConfigError, InternalError, ModelFileError, MoegraphError, RequestError
from ...units import GiB, KiB, format_bytes
from .messages import Message

MAX_TEMPLATE_BYTES = 256 * KiB
MAX_OUTPUT_CHARS = 4 * 1024 * KiB
MAX_SECONDS = 5.0
MAX_MEMORY_BYTES = 1 * GiB

TEMPLATE_KEY = "tokenizer.chat_template"
_RENDERER = Path(__file__).with_name("render.py")


def require_template(kv: Mapping[str, object], path: Path) -> str:
    """Return the source of a model file's chat template."""
    source = kv.get(TEMPLATE_KEY)
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{path}: the model has no chat template ({TEMPLATE_KEY}), so it is probably a base "
            "model; continue plain text with 'moegraph run', or give --chat-template-file"
        )
    return source


class ChatTemplate(Closable):
    """Turn messages into a prompt; close it when done, or use it in a with statement.

    Args:
        source: the template, in Jinja.
        origin: its source, for messages.
        refusal: the class of error to raise if the template is at fault.
        tokens: variables of every rendering, such as bos_token.
        max_seconds: CPU time limit of one rendering; a busy machine may take longer.

    Raises:
        MoegraphError: of the class `refusal`, if the template is too large or not valid.
    """

    def __init__(
        self,
        source: str,
        origin: str = "chat template",
        *,
        refusal: type[MoegraphError] = ConfigError,
        tokens: Mapping[str, str] | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.source = source
        self.origin = origin
        self._refusal = refusal
        self._tokens = dict(tokens or {})
        self._max_seconds = max_seconds
        self._child: subprocess.Popen[str] | None = None
        size = len(source.encode(errors="surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise refusal(
                f"{origin}: the chat template has {format_bytes(size)}; "
                f"at most {format_bytes(MAX_TEMPLATE_BYTES)} are allowed"
            )
        self._start()

    @classmethod
    def from_metadata(
        cls, kv: Mapping[str, object], path: Path, tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate:
        """Return the chat template of a model file.

        Raises:
            ConfigError: the file has none.
            ModelFileError: the template is too large or not valid.
        """
        source = require_template(kv, path)
        return cls(source, str(path), refusal=ModelFileError, tokens=tokens)

    @classmethod
    def from_file(cls, path: Path, tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Return the template in a file.

        Raises:
            ConfigError: the file cannot be read, is too large, or is not a valid template.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_TEMPLATE_BYTES + 1)
            source = data.decode()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the chat template: {error.strerror}") from error
        except UnicodeDecodeError as error:
            if len(data) <= MAX_TEMPLATE_BYTES:
                raise ConfigError(
                    f"{path}: the chat template is not UTF-8 (byte {error.start})"
                ) from error
            source = data.decode(errors="replace")
        return cls(source, str(path), tokens=tokens)

    @property
    def knows_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self.source

    def render(self, messages: Iterable[Message | Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt for messages, up to the start of the next assistant message.

        messages: a mapping is passed to the template as it is.
        variables: further names for the template, such as enable_thinking.

        Raises:
            RequestError: the template refuses these messages.
            MoegraphError: of the class `refusal`, if the template fails or exceeds a limit.
        """
        if self._child is None or self._child.poll() is not None:
            self.close()  # somebody ended it, such as the kernel when memory ran out
            self._start()
        values = {
            **self._tokens,
            "messages": [
                {"role": m.role, "content": m.content} if isinstance(m, Message) else dict(m)
                for m in messages
            ],
            "add_generation_prompt": True,
            **variables,
        }
        answer = self._exchange(json.dumps(values))
        return str(answer["text"])

    def close(self) -> None:
        """End the child process; a second call does nothing."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    # it flushes, and the reader no longer exists
                    with suppress(BrokenPipeError):
                        stream.close()

    def _start(self) -> None:
        # A session of its own keeps Ctrl-C at the terminal away from the child.
        self._child = subprocess.Popen(
            [sys.executable, os.fspath(_RENDERER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
        limits = {
            "seconds": self._max_seconds,
            "bytes": MAX_MEMORY_BYTES,
            "chars": MAX_OUTPUT_CHARS,
        }
        self._exchange(json.dumps(limits) + "\n" + json.dumps(self.source))

    def _exchange(self, line: str) -> dict[str, Any]:
        """Send a line and return the answer; raise the error that the answer names."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise InternalError("the chat template process is not running")
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            reply = child.stdout.readline()
        except BrokenPipeError:
            reply = ""
        except BaseException:
            # After an interrupt here, the next answer would belong to this question.
            self.close()
            raise
        answer = json.loads(reply) if reply else self._cause_of_death(child)
        if "error" in answer:
            self._fail(answer["kind"], answer["error"])
        return dict(answer)

    def _cause_of_death(self, child: subprocess.Popen[str]) -> dict[str, str]:
        status = child.wait()
        if status == -signal.SIGPROF:
            took = f"more than {self._max_seconds:g} seconds of CPU time"
            return {"kind": "limit", "error": took}
        return {"kind": "limit", "error": f"its process ended with status {status}"}

    def _fail(self, kind: str, reason: str) -> None:
        if kind == "refused":
            raise RequestError(f"the chat template refuses the messages: {reason}")
        self.close()
        did = {
            "syntax": "the chat template is not valid",
            "failed": "the chat template failed",
            "limit": "the chat template exceeded a limit",
        }[kind]
        raise self._refusal(f"{self.origin}: {did}: {reason}")
