"""Perplexity of a text, and how far a model's probabilities are from those of another one.

Method, figures, printed digits and file are those of llama-perplexity (tools/perplexity). The text
is cut into chunks of n_ctx tokens, each a sequence of its own whose first token is BOS if the
vocabulary has it added, and the second half of each chunk is scored. Numbers of one token are F32
and sums F64, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..engine import Engine
from ..errors import Cancelled, ConfigError, RequestError
from ..events import CancelToken
from ..runner.sweep_batch import SweepBatch

Ids = npt.NDArray[np.int32]
Row = npt.NDArray[np.float32]
# A scored row: its logits, F32 [n_vocab], and the token that follows it.
Scored = tuple[Row, int]
MIN_CTX = 8  # fewer leave nothing to score
_MAGIC = b"_logits_"
# Smaller logarithms of probabilities are not kept, and do not count.
_LEAST = np.float32(16)


def chunks_of(engine: Engine, text: str, n_ctx: int) -> Ids:
    """Return the chunks of a text, I32 numpy [n, n_ctx].

    Raises:
        RequestError: the text is too short.
    """
    ids = np.array(engine.tokenizer.encode(text, parse_special=False), dtype=np.int32)
    if len(ids) < 2 * n_ctx:
        raise RequestError(
            f"the text has {len(ids)} tokens; with a context of {n_ctx} it needs {2 * n_ctx}: "
            "give a longer one, or lower -c"
        )
    return ids[: len(ids) // n_ctx * n_ctx].reshape(-1, n_ctx)


def score(engine: Engine, chunks: Ids, cancel: CancelToken | None) -> Iterator[list[Scored]]:
    """Yield the scored rows of each chunk.

    Raises:
        Cancelled: cancel was set.
    """
    n_ctx = chunks.shape[1]
    tokenizer, n_skipped = engine.tokenizer, n_ctx // 2
    begins = tokenizer.encode("")[:1] == [tokenizer.bos]
    for chunk in chunks:
        if cancel and cancel.is_set():
            raise Cancelled
        engine.reset()
        given = chunk.copy()
        if begins:
            given[0] = tokenizer.bos
        batch = SweepBatch(given, all_rows=True, n_skipped=n_skipped)
        logits = engine.passes.read(batch, cancel)[0].require_logits()
        # a short prompt skips no row
        yield list(zip(logits[n_skipped - n_ctx : -1], chunk[n_skipped + 1 :].tolist()))


def _log_sum(row: Row) -> tuple[np.float32, float]:
    """Return the largest logit, and the logarithm of the sum of exp(logit - largest)."""
    top = row.max()
    return top, float(np.log(_exp(row - top).sum(dtype=np.float64)))


def _exp(row: Row) -> Row:
    """Return what expf of the C library does; numpy's own in F32 has other last bits."""
    found: Row = np.exp(row, dtype=np.float64).astype(np.float32)
    return found


def _on_cores(work: Callable[..., Any], *given: Iterable[Any]) -> list[Any]:
    """Return what work makes of each row; numpy lets other threads run meanwhile."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, *given))


def nlls(rows: list[Scored], base: BinaryIO | None = None) -> list[float]:
    """Return negative log-likelihoods of rows, and write their probabilities to a base file."""
    if not base:
        return _on_cores(_nll, rows)
    found = _on_cores(_packed, rows)
    base.writelines(words.tobytes() for words, _ in found)
    return [nll for _, nll in found]


def _nll(scored: Scored) -> float:
    (row, token), (top, log_sum) = scored, _log_sum(scored[0])
    return log_sum - float(row[token] - top)


def _packed(scored: Scored) -> tuple[npt.NDArray[np.uint16], float]:
    """Return the words of a row in a base file, and its negative log-likelihood as it is there."""
    (row, token), (top, log_sum) = scored, _log_sum(scored[0])
    low, total = max(row.min(), top - _LEAST), np.float32(log_sum)
    scale = (top - low) / np.float32(65535)
    words = np.zeros(_n_words(len(row)), dtype=np.uint16)
    words[:4] = np.array([scale, low - top - total], dtype=np.float32).view(np.uint16)
    if scale:
        steps = np.rint(np.float32(1) / scale * (row - low))
        words[4 : 4 + len(row)] = np.where(row > low, steps, 0)
    return words, float(top + total - row[token])


def estimate(found: list[float]) -> str:
    """Return llama-perplexity's last line."""
    mean, error = _mean(np.array(found), 2)
    if not error:
        return "Unexpected negative standard deviation of log(prob)"
    return f"Final estimate: PPL = {np.exp(mean):.4f} +/- {np.exp(mean) * error:.5f}"


def _n_words(n_vocab: int) -> int:
    """Return the 16-bit words of a row of a base file: scale, least logarithm, and steps."""
    return 2 * ((n_vocab + 1) // 2) + 4


def begin_base(file: BinaryIO, chunks: Ids, n_vocab: int) -> None:
    """Write the head of a base file; `nlls` writes the rest."""
    n, n_ctx = chunks.shape
    file.write(_MAGIC + np.array([n_ctx, n_vocab, n], dtype="<i4").tobytes() + chunks.tobytes())


def open_base(path: Path) -> tuple[int, Ids, npt.NDArray[np.uint16]]:
    """Read a base file: tokens of the vocabulary, chunks, words [n_chunks, n_scored, n_words].

    Raises:
        ConfigError: it cannot be read, is none, or is damaged.
    """
    try:
        with path.open("rb") as file:
            head, n_bytes = file.read(20), path.stat().st_size
            if head[:8] != _MAGIC or len(head) < 20:
                raise ConfigError(f"{path}: not a file of --kl-divergence-base")
            n_ctx, n_vocab, n = np.frombuffer(head[8:], dtype="<i4").tolist()
            shape = (n, max(n_ctx - 1 - n_ctx // 2, 0), _n_words(n_vocab))
            offset = 20 + 4 * n * n_ctx
            if min(n_ctx - MIN_CTX, n_vocab - 1, n - 1) < 0 or n_bytes < offset + 2 * prod(shape):
                raise ConfigError(f"{path}: the file is damaged or was cut short")
            ids = np.frombuffer(file.read(offset - 20), dtype="<i4")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise ConfigError(f"{path}: the file is damaged: it has a token beyond {n_vocab - 1}")
    return n_vocab, ids.reshape(n, n_ctx), np.memmap(path, np.uint16, "r", offset, shape)


def _mean(found: npt.NDArray[Any], least: int = 11) -> tuple[float, float]:
    """Return a mean, and its uncertainty from `least` numbers on; sums are F64, squares are not."""
    n, mean = len(found), found.mean(dtype=np.float64)
    var = (found * found).mean(dtype=np.float64) - mean * mean
    return float(mean), float(np.sqrt(var / (n - 1))) if var > 0 and n >= least else 0.0


def _compared(scored: Scored, words: npt.NDArray[np.uint16]) -> tuple[Any, ...]:
    """Return nll, nll of the base, difference of probabilities, F32; KL divergence, F64; whether
    both have the same likeliest token."""
    (row, token), (top, log_sum) = scored, _log_sum(scored[0])
    total = top + np.float32(log_sum)
    scale, least = words[:4].view(np.float32)
    log_p = scale * words[4 : 4 + len(row)].astype(np.float32) + least
    nll, nll_base = total - row[token], -log_p[token]
    kld = (_exp(log_p) * (log_p - row + total))[log_p > -_LEAST].sum(dtype=np.float64)
    p_diff = np.subtract(*_exp(np.array([-nll, -nll_base])))
    return nll, nll_base, p_diff, kld, row.argmax() == log_p.argmax()


class Divergence:
    """How far a model's probabilities are from a base file's: llama-perplexity's statistics."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, ...]] = []  # of each token, as `_compared`

    def add(self, rows: list[Scored], base: npt.NDArray[np.uint16]) -> str:
        """Take the rows of a chunk; return llama-perplexity's line of it, without its number."""
        self._found += _on_cores(_compared, rows, base)
        with np.errstate(all="ignore"):  # equal models have no uncertainty
            log, _, _, ratio, kld, _, rms, same = self._means()
        return (
            f"    {np.exp(log[0]):9.4f} ± {np.exp(log[0]) * log[1]:9.4f}"
            + "".join(f"    {x:10.5f} ± {error:10.5f}" for x, error in (ratio, kld))
            + "".join(f"    {100 * x:6.3f} ± {100 * error:6.3f} %" for x, error in (rms, same))
        )

    def _columns(self) -> list[npt.NDArray[Any]]:
        return [np.array(column) for column in zip(*self._found)]

    def _means(self) -> list[tuple[float, float]]:
        """Return means and uncertainties: nll, nll_base, their covariance, their difference, KL
        divergence, difference of probabilities, its RMS, and the share of equal choices."""
        nll, nll_base, p_diff, klds, same = self._columns()
        n, (log, error), (log_base, error_base) = len(nll), _mean(nll), _mean(nll_base)
        both = (nll * nll_base).mean(dtype=np.float64)
        cov = (both - log * log_base) / (n - 1) if n >= 10 else 0.0
        mse, share = _mean((p_diff * p_diff).astype(np.float64)), same.mean()
        return [
            (log, error), (log_base, error_base), (cov, 0.0),
            (log - log_base, np.sqrt(error**2 + error_base**2 - 2 * cov)),
            _mean(klds), _mean(p_diff),
            (np.sqrt(mse[0]), np.float64(0.5) / np.sqrt(mse[0]) * mse[1]),
            (share, np.sqrt(share * (1 - share) / (n - 1))),
        ]  # fmt: skip

    def lines(self) -> list[str]:
        """Return llama-perplexity's statistics; none of fewer than 100 tokens."""
        if len(self._found) < 100:
            return []
        with np.errstate(all="ignore"):
            log, base_log, (cov, _), ratio, kld, p_diff, rms, same = self._means()
            of_ratio, ppl, base = np.exp([ratio[0], log[0], base_log[0]])
            errors = ppl * log[1], base * base_log[1]
            difference = np.sqrt(errors[0] ** 2 + errors[1] ** 2 - 2 * ppl * base * cov)
            cor = np.float64(cov) / (log[1] * base_log[1])
        _, _, p_diffs, klds, _ = self._columns()
        return [
            "====== Perplexity statistics ======",
            f"Mean PPL(Q)                   : {ppl:10.6f} ± {errors[0]:10.6f}",
            f"Mean PPL(base)                : {base:10.6f} ± {errors[1]:10.6f}",
            f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * cor:6.2f}%",
            f"Mean ln(PPL(Q)/PPL(base))     : {ratio[0]:10.6f} ± {ratio[1]:10.6f}",
            f"Mean PPL(Q)/PPL(base)         : {of_ratio:10.6f} ± {of_ratio * ratio[1]:10.6f}",
            f"Mean PPL(Q)-PPL(base)         : {ppl - base:10.6f} ± {difference:10.6f}",
            "",
            "====== KL divergence statistics ======",
            f"Mean    KLD: {kld[0]:10.6f} ± {kld[1]:10.6f}",
            *(f"{name} KLD: {x:10.6f}" for name, x in _quantiles(klds.astype(np.float32))),
            "",
            "====== Token probability statistics ======",
            f"Mean    Δp: {100 * p_diff[0]:6.3f} ± {100 * p_diff[1]:5.3f} %",
            *(f"{name} Δp: {100 * float(x):6.3f}%" for name, x in _quantiles(p_diffs, (0.75,))),
            f"RMS Δp    : {100 * rms[0]:6.3f} ± {100 * rms[1]:5.3f} %",
            f"Same top p: {100 * same[0]:6.3f} ± {100 * same[1]:5.3f} %",
        ]


def _quantiles(values: Row, inner: tuple[float, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield names and values of quantiles, from the largest on."""
    upper, ordered = (0.999, 0.99, 0.95, 0.9, *inner), np.sort(values)
    yield "Maximum", ordered[-1]
    for share in (*upper, 0.5, *(round(1 - x, 3) for x in reversed(upper))):
        place = np.float32(share) * np.float32(len(values) - 1)
        i = int(place)
        part = place - np.float32(i)
        name = "Median " if share == 0.5 else f"{100 * share:4.1f}%  "
        yield name, (1 - part) * ordered[i] + part * ordered[min(i + 1, len(values) - 1)]
    yield "Minimum", ordered[0]
