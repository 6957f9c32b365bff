"""Log lines on stderr, as text or JSON; what came from a client is escaped."""

from __future__ import annotations

import json
import logging
import time
from typing import TextIO

FORMATS = ("text", "json", "off")
# Attributes that every record has; what else it has was given by the caller.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ROOTS = ("moegraph", "uvicorn")


def start_logging(format: str, stream: TextIO) -> None:
    """Write the server's log lines to a stream. format: one of FORMATS."""
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers.clear()
        if format == "off":
            logger.addHandler(logging.NullHandler())
            continue
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonLines() if format == "json" else TextLines())
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING if name == "uvicorn" else logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _OWN}
    return {name: value for name, value in found.items() if value is not None}


class TextLines(logging.Formatter):
    """A time, a message, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback after it if there is one."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [at, _escaped(record.getMessage())]
        if record.levelno >= logging.WARNING:
            words.insert(1, f"{record.levelname.lower()}:")
        words += [f"{name}={_escaped(str(value))}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        found = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def _escaped(text: str) -> str:
    """Return text that cannot begin another line or move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]
