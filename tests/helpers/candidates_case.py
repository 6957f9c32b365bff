"""Rows of logits through the op of candidates, on any device."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from moegraph.engine import Engine
from moegraph.ggml.choose import DRAW_WORDS
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, I32, Builder
from moegraph.loop.choice import RowSampler
from moegraph.sampling import Sampler, SamplingParams, gumbel

N_LISTED, N_EARLY, N_MASSES, N_PARTS, N_IDS = 384, 32, 8, 32, 508
# struct moegraph_listed
ROW = np.dtype(
    [
        ("total", "f4"), ("largest", "f4"), ("floor", "f4"), ("n_likely", "i4"),
        ("ids", "i4", N_LISTED), ("logits", "f4", N_LISTED),
        ("early_floor", "f4"), ("n_early", "i4"), ("early_ids", "i4", N_EARLY),
        ("early_logits", "f4", N_EARLY), ("above", "f4", (N_PARTS, N_MASSES)),
        ("n_above", "i4", (N_PARTS, N_MASSES)), ("wanted", "f4", N_IDS),
    ]
)  # fmt: skip


class CandidatesBench:
    """One graph of the op for rows of a size; `run` computes it."""

    def __init__(self, device: Device, n_vocab: int, n_rows: int = 1) -> None:
        self.device, self.n_vocab, self.n_rows = device, n_vocab, n_rows
        self._context = Context(16, 16)
        b = Builder(self._context, 16)
        self._logits = b.leaf(F32, (n_vocab, n_rows), "logits")
        self._draws = b.leaf(I32, (DRAW_WORDS, n_rows), "draws")
        self._out = b.expand(b.candidates(self._logits, self._draws))
        self._graph = b.graph
        tensors = (self._logits, self._draws, self._out)
        sizes = [-(-C.ggml_nbytes(t) // 256) * 256 for t in tensors]
        self._buffer = device.buffer(sum(sizes), "a test", "")
        for i, tensor in enumerate(tensors):
            place(self._buffer, tensor, sum(sizes[:i]))

    def __enter__(self) -> CandidatesBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.device.synchronize()
        self._buffer.close()
        self._context.close()

    def run(self, logits: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the result's words, I32 [n_rows, n]; view them as ROW."""
        for tensor, values in ((self._logits, logits), (self._draws, draws)):
            data = np.ascontiguousarray(values).reshape(self.n_rows, -1)
            assert data.nbytes == C.ggml_nbytes(tensor) and data.itemsize == 4
            C.ggml_backend_tensor_set_async(
                self.device.compute.ptr, tensor, ffi.from_buffer(data), 0, data.nbytes
            )
            self.device.synchronize()
        self.device.check(C.mg_launch(self.device.compute.ptr, self._graph, ffi.NULL, 0), "a test")
        words = np.empty((self.n_rows, ROW.itemsize // 4), dtype=np.int32)
        assert words.nbytes == C.ggml_nbytes(self._out)
        C.ggml_backend_tensor_get_async(
            self.device.compute.ptr, self._out, ffi.from_buffer(words), 0, words.nbytes
        )
        self.device.synchronize()
        return words


def draw_words(temperature: float = 0.0, key: int = 0, wanted: tuple[int, ...] = ()) -> np.ndarray:
    """Return a row's input."""
    words = np.full(DRAW_WORDS, -1, dtype=np.int32)
    words[:1].view(np.float32)[0] = 1 / temperature if temperature > 0 else 0
    words[1:3].view(np.uint32)[:] = key & 0xFFFFFFFF, key >> 32
    words[4 : 4 + len(wanted)] = wanted
    return words


def rows_of_logits(n_vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return rows of many kinds, by name."""
    normal = rng.standard_normal(n_vocab).astype(np.float32)
    peaked = normal * 3
    peaked[rng.integers(n_vocab)] = 30
    clustered = normal.copy()
    clustered[: max(1, n_vocab // 50)] += 4
    return {
        "normal": normal,
        "narrow": normal * 0.01,
        "wide": normal * 1000,
        "peaked": peaked,
        "clustered": clustered,
        "equal": np.full(n_vocab, -2.5, dtype=np.float32),
        "ties": np.round(normal * 2).astype(np.float32),
        "two": np.where(np.arange(n_vocab) % 3 == 1, 1, 0).astype(np.float32),
        "exponential": rng.exponential(3, n_vocab).astype(np.float32),
        "huge": (normal * 1e37).astype(np.float32),
    }


def check_row(row: np.ndarray, logits: np.ndarray, scores: np.ndarray | None) -> None:
    """Check a result against its definition; scores: of all tokens, None if none were wanted."""
    n = logits.size
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    assert row["largest"] == logits.max()
    assert abs(row["total"] - weights.sum()) <= 1e-5 * weights.sum()
    n_likely = int((logits >= row["floor"]).sum())
    assert row["n_likely"] == n_likely
    assert n_likely >= min(n, 128)
    if n <= N_LISTED:
        assert n_likely == n
    order = np.lexsort((np.arange(n), -logits))
    if n_likely <= N_LISTED:
        np.testing.assert_array_equal(row["ids"][:n_likely], order[:n_likely])
        np.testing.assert_array_equal(row["logits"][:n_likely], logits[order[:n_likely]])
    if scores is None:
        assert row["n_early"] == 0
        return
    check_early(row, logits, scores, weights, order)


def check_early(
    row: np.ndarray, logits: np.ndarray, scores: np.ndarray, weights: np.ndarray, order: np.ndarray
) -> None:
    """Check the list of the largest scores, and what is above each of them."""
    n_early, floor = int(row["n_early"]), float(row["early_floor"])
    error = 2e-5 * (2 + abs(floor) + abs(float(row["largest"])))
    assert (scores >= floor + error).sum() <= n_early <= (scores >= floor - error).sum()
    assert n_early >= min(logits.size, 8)
    if n_early > N_EARLY:
        return
    ids = row["early_ids"][:n_early]
    assert set(np.flatnonzero(scores >= floor + error)) <= set(ids.tolist())
    assert len(set(ids.tolist())) == n_early
    np.testing.assert_array_equal(row["early_logits"][:n_early], logits[ids])
    rank = np.empty(logits.size, dtype=np.int64)
    rank[order] = np.arange(logits.size)
    before = np.concatenate([[0.0], weights[order].cumsum()])
    for k, token in enumerate(ids[:N_MASSES]):
        assert row["n_above"][:, k].sum() == rank[token]
        above = row["above"][:, k].sum(dtype=np.float64)
        assert abs(above - before[rank[token]]) <= 1e-5 * weights.sum()


def check_passes(engine: Engine, params: SamplingParams, n: int) -> None:
    """Generate n tokens from candidates; each is what the logits of the same pass give."""
    n_vocab, ids = engine.hparams.n_vocab, [5, 6, 7, 8]
    rows, plain = RowSampler(params, n_vocab), Sampler(params, n_vocab)
    rows.accept_all(ids)
    plain.accept_all(ids)
    engine.reset()
    for _ in range(n):
        draw = rows.draw()
        assert draw is not None
        engine.passes.submit(np.array(ids), 0, False, False, None, draws=draw[None])
        found = engine.passes.collect().candidates
        assert found is not None and found.shape == (1, ROW.itemsize // 4)
        logits = engine.passes.runner.logits(0).copy()
        token = rows.sample(found[0], lambda row=logits: row)
        assert token == plain.sample(logits)
        assert found.view(ROW)[0, 0]["largest"] == logits.max()
        for sampler in (rows, plain):
            sampler.accept(token)
        ids = [token]
    assert rows.n_whole < n // 2


def check_any_row(device: Device, n_vocab: int) -> None:
    """Assert lists, sums and wanted logits of rows of all kinds."""
    rng = np.random.default_rng(n_vocab)
    with CandidatesBench(device, n_vocab) as bench:
        for name, logits in rows_of_logits(n_vocab, rng).items():
            for temperature in (0.0, 0.7, 1.0, 30.0):
                key = int(rng.integers(1 << 63))
                words = bench.run(logits, draw_words(temperature, key, (0, n_vocab)))
                scores = None
                if temperature:
                    scores = logits / temperature + gumbel(key, np.arange(n_vocab))
                row = words.view(ROW)[0, 0]
                try:
                    check_row(row, logits, scores)
                except AssertionError as error:
                    raise AssertionError(f"{name}, temperature {temperature}") from error
                assert row["wanted"][0] == logits[0] and np.isnan(row["wanted"][1])


def check_rows_alone(device: Device, n_rows: int, n_vocab: int, n_runs: int) -> None:
    """Assert that each row gives what it gives alone, bit for bit, whenever a graph runs."""
    logits = np.random.default_rng(5).standard_normal((n_rows, n_vocab)).astype(np.float32)
    draws = np.stack([draw_words(i % 3, i, (i,)) for i in range(n_rows)])
    with CandidatesBench(device, n_vocab, n_rows) as bench:
        runs = [bench.run(logits, draws).view(ROW)[:, 0] for _ in range(n_runs)]
    with CandidatesBench(device, n_vocab) as bench:
        for i in range(n_rows):
            alone = bench.run(logits[i], draws[i]).view(ROW)[0, 0]
            n, n_early = alone["n_likely"], alone["n_early"]
            for together in runs:
                for name, end in (
                    ("ids", n), ("logits", n), ("early_ids", n_early), ("wanted", None)
                ):  # fmt: skip
                    np.testing.assert_array_equal(together[i][name][:end], alone[name][:end])
                for name in ("total", "largest", "floor", "n_likely", "n_early"):
                    assert together[i][name] == alone[name]


def check_not_finite(device: Device, n_vocab: int) -> None:
    """Assert that a logit that is not finite shows in the sum, wherever it is."""
    with CandidatesBench(device, n_vocab) as bench:
        for bad in (np.nan, np.inf, -np.inf):
            for at in (0, n_vocab // 2 + 200, n_vocab - 1):
                logits = np.random.default_rng(1).standard_normal(n_vocab).astype(np.float32)
                logits[at] = bad
                for temperature in (0.0, 1.0):
                    row = bench.run(logits, draw_words(temperature)).view(ROW)[0, 0]
                    assert np.isnan(row["total"]), (bad, at, temperature)
