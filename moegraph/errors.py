"""The error tree: each class has an exit code, and `str(error)` is the one line a user sees.

A message says what happened, the value, the limit, and what to do.
"""

from __future__ import annotations

# Enough for two paths and a sentence, and a bound for hostile names in a file.
_MAX_CHARS = 1200


def one_line(text: str) -> str:
    """Escape every unprintable character and cut a long text in its middle."""
    shown = _middle_cut(text)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return _middle_cut(shown)


def _middle_cut(text: str) -> str:
    """Cut a long text in its middle: it starts with the path and ends with limit and remedy."""
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[: _MAX_CHARS - 405]} ... {text[-400:]}"


class MoegraphError(Exception):
    """Base of all errors that moegraph raises on purpose."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(MoegraphError):
    """A setting is wrong: the message names field, value and allowed range."""

    exit_code = 2


class RequestError(MoegraphError):
    """A request is wrong: its prompt, token ids or stop strings."""

    exit_code = 2


class ContextOverflow(RequestError):
    """A request needs more positions than the context has.

    n_prompt, n_ctx: tokens of the prompt, at least, and positions of the context, where known.
    """

    def __init__(self, message: str, n_prompt: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class PoolFull(ContextOverflow):
    """Sequences need pages of the KV cache that others have; free some, and try again."""

    def __init__(self, n_needed: int, n_free: int) -> None:
        super().__init__(
            f"the KV cache is full: pages needed: {n_needed}, free: {n_free}; raise -c, or serve "
            "fewer sequences at once"
        )


class EngineBusy(RequestError):
    """A generation is running on this engine: close it, or wait until it ends."""


class QueueFull(RequestError):
    """A service has as many waiting requests as it takes; try again after retry_after_s seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceClosed(RequestError):
    """A service takes no more requests, because it is ending."""


class ModelFileError(MoegraphError):
    """A model file is missing, unreadable or malformed: the message names file, offset and key."""

    exit_code = 3


class UnsupportedModel(ModelFileError):
    """A well-formed file with an architecture, tensor or type that moegraph does not run."""


class NativeError(MoegraphError):
    """ggml or CUDA reported a failure: the message names op, tensor and shapes.

    Not every failure raises: ggml aborts on any failed CUDA call. The process then prints one line
    and ends at once with status 4, without Python's clean-up.
    """

    exit_code = 4


class DeviceLost(NativeError):
    """A worker on another machine is gone, and with it what its devices held; load again."""


class OutOfDeviceMemory(NativeError):
    """A device allocation failed: the message names size, free memory and a setting to lower."""


class Cancelled(MoegraphError):
    """The work was cancelled, by Ctrl-C or by a cancel token."""

    exit_code = 130

    def __init__(self, message: str = "cancelled") -> None:
        super().__init__(message)


class InternalError(MoegraphError):
    """An invariant of moegraph failed; the message asks for a report."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(f"internal error: {message} (please report this)")
