"""Look-ups that fetch, on any device, beside a model of them that knows numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moegraph.ggml.device import Device, HostBuffer
from moegraph.ggml.handles import Buffer
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, I32, Builder, Tensor
from moegraph.graphs.cache import GraphCache
from moegraph.units import round_up

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Shape(NamedTuple):
    """n: of the table; n_rows: of the target; m: numbers in a row, pads: behind each of them."""

    n_ids: int
    n_victims: int
    n: int
    n_rows: int
    m: int
    source_pad: int = 0
    target_pad: int = 0


class Lookup(NamedTuple):
    """What a fetch is told: table, ids, and what may be given up: (row, what it holds or -1)."""

    table: Ints
    ids: Ints
    victims: Ints

    @classmethod
    def of(
        cls, n: int, held: dict[int, int], ids: Sequence[int], victims: Sequence[tuple[int, int]]
    ) -> Lookup:
        """Return a look-up where held says in which row what is."""
        table = np.full(n, -1, np.int32)
        for expert, row in held.items():
            table[expert] = row
        pairs = np.array(victims, np.int32).reshape(-1, 2)
        return cls(table, np.array(ids, np.int32), pairs)


def fetch(lookup: Lookup, source: Floats, target: Floats, m: int) -> tuple[list[int], Floats]:
    """Return the rows that a look-up gives, and what target holds then.

    The rule for victims: keep it in step with `moegraph_fetch_assign` (C and CUDA) and with
    `LayerSlots.commit_fetched`.
    """
    needed, target = set(lookup.ids.tolist()), target.copy()
    spare = [row for row, holds in lookup.victims.tolist() if holds not in needed or holds < 0]
    rows = dict(enumerate(lookup.table.tolist()))
    for one in dict.fromkeys(lookup.ids.tolist()):
        if one in rows and rows[one] < 0 and spare:
            rows[one] = spare.pop(0)
            target[rows[one], :m] = source[one, :m]
    return [rows.get(one, -1) for one in lookup.ids.tolist()], target


def random_lookup(rng: np.random.Generator, shape: Shape) -> Lookup:
    """Draw a look-up of any kind: nothing missing to all missing, ids repeated or outside."""
    n, n_rows = shape.n, shape.n_rows
    n_held = int(rng.integers(0, min(n, n_rows) + 1))
    held = dict(zip(rng.permutation(n)[:n_held].tolist(), rng.permutation(n_rows).tolist()))
    holds = {row: expert for expert, row in held.items()}
    rows = rng.permutation(n_rows)[: shape.n_victims].tolist()
    ids = rng.integers(0, n, shape.n_ids)
    if held and rng.random() < 0.5:  # few are missing
        likely = rng.random(shape.n_ids) < 0.8
        ids = np.where(likely, rng.choice(list(held), shape.n_ids), ids)
    outside = rng.choice([-1, -7, -(2**31), n, n + 3, 2**31 - 1], shape.n_ids)
    ids = np.where(rng.random(shape.n_ids) < 0.1, outside, ids)
    victims = [(row, holds.get(row, -1)) for row in rows]
    victims += victims[:1] * (shape.n_victims - len(victims))  # more than there are rows
    return Lookup.of(n, held, ids.tolist(), victims)


# n, rows and victims (0: as many as ids) of look-ups: small, large, of many rows that miss much.
ANY = ((100, 40, 0), (8, 8, 3), (100, 70, 64), (300, 1, 1), (256, 160, 160), (700, 256, 0))


class Bench:
    """One graph that fetches, in memory of its own, launched as often as wanted.

    pinned: the source is memory of the host, as experts are. follows: a product with the rows that
    were looked up comes behind it in the graph; a row is then a matrix [K, m / K].
    """

    K = 512

    def __init__(
        self, device: Device, shape: Shape, pinned: bool = False, follows: bool = False
    ) -> None:
        self.device, self.shape, self._follows = device, shape, follows
        s_stride, t_stride = shape.m + shape.source_pad, shape.m + shape.target_pad
        self.source = np.zeros((shape.n, s_stride), np.float32)
        self.target = np.zeros((shape.n_rows, t_stride), np.float32)
        self._host: Buffer = (
            device.host_buffer(self.source.nbytes, must_pin=True)
            if pinned
            else device.buffer(self.source.nbytes, "the source", "free memory")
        )
        n_seen = shape.n_ids * (shape.m // self.K if follows else 1)
        words = {
            "table": shape.n,
            "ids": shape.n_ids,
            "victims": 2 * shape.n_victims,
            "slots": shape.n_ids,
            "x": self.K,
            "seen": n_seen,
            "target": self.target.size,
        }
        self._at, size = {}, 0
        for name, n in words.items():
            self._at[name] = size
            size = round_up(size + 4 * n, device.alignment)
        self._memory = device.buffer(size, "the operands", "free memory")
        C.ggml_backend_buffer_clear(self._memory.ptr, 0)
        self._graphs = GraphCache(device)
        self._built = self._graphs.get("fetch", 16, self._build)

    def _leaf(self, b: Builder, name: str, dtype: int, *ne: int) -> Tensor:
        tensor = b.leaf(dtype, ne, name)
        place(self._memory, tensor, self._at[name])
        return tensor

    def _build(self, b: Builder) -> dict[str, Tensor]:
        shape = self.shape
        made = {
            "table": self._leaf(b, "table", I32, 1, shape.n),
            "ids": self._leaf(b, "ids", I32, shape.n_ids),
            "victims": self._leaf(b, "victims", I32, 2, shape.n_victims),
            "x": self._leaf(b, "x", F32, self.K, 1, 1),
        }
        rows = []
        for name, array in (("source", self.source), ("target", self.target)):
            rows.append(strided(b, name, shape.m, *array.shape))
            memory, at = (self._host, 0) if name == "source" else (self._memory, self._at[name])
            place(memory, rows[-1], at)
            # all its bytes, those between the rows too
            made[name] = b.leaf(F32, (array.size,), "all of it")
            place(memory, made[name], at)
        slots = b.fetch_rows(made["table"], made["ids"], made["victims"], *rows)
        place(self._memory, slots, self._at["slots"])
        made["slots"] = b.expand(slots)
        if self._follows:
            k, stride = self.K, 4 * self.target.shape[1]
            stack = b.leaf(F32, (k, shape.m // k, shape.n_rows), "the target as matrices")
            stack.nb[2], stack.nb[3] = stride, stride * shape.n_rows
            place(self._memory, stack, self._at["target"])
            seen = b.mul_mat_id(stack, made["x"], b.reshape(slots, shape.n_ids, 1))
            place(self._memory, seen, self._at["seen"])
            made["seen"] = b.expand(seen)
        return made

    def fill(self, rng: np.random.Generator) -> None:
        """Fill source and target, and what lies between their rows, with small integers."""
        for name, array in (("source", self.source), ("target", self.target)):
            array[:] = rng.integers(-99, 100, array.shape)
            self._set(name, array)
        self._set("x", np.ones(self.K, np.float32))

    def _set(self, name: str, array: npt.NDArray) -> None:
        data, tensor = np.ascontiguousarray(array), self._built.outputs[name]
        if name == "source" and isinstance(self._host, HostBuffer):
            self._host.array[: data.nbytes] = data.reshape(-1).view(np.uint8)
        elif data.nbytes:
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)

    def _get(self, name: str, dtype: Any, *ne: int) -> npt.NDArray:
        found = np.empty(ne, dtype)
        tensor = self._built.outputs[name]
        C.ggml_backend_tensor_get(tensor, ffi.from_buffer(found), 0, found.nbytes)
        return found

    def run(self, lookup: Lookup) -> list[int]:
        """Look up once; compare rows, target and all between its rows with the model."""
        shape, device = self.shape, self.device
        for name, array in lookup._asdict().items():
            self._set(name, array)
        self._set("slots", np.full(shape.n_ids, -77, np.int32))
        device.synchronize()
        device.check(C.mg_launch(device.compute.ptr, self._built.graph, ffi.NULL, 0), "fetch")
        device.synchronize()
        rows, self.target = fetch(lookup, self.source, self.target, shape.m)
        assert self._get("slots", np.int32, shape.n_ids).tolist() == rows, lookup
        np.testing.assert_array_equal(
            self._get("target", np.float32, *self.target.shape), self.target, err_msg=str(lookup)
        )
        if self._follows:
            self._check_product(rows)
        return rows

    def _check_product(self, rows: list[int]) -> None:
        """Sums of small integers are exact in every type that a kernel may use."""
        n, m = self.shape.n_ids, self.shape.m
        sums = self.target[:, :m].reshape(-1, m // self.K, self.K).sum(axis=2)
        there = np.array(rows)[:, None] >= 0
        np.testing.assert_array_equal(
            self._get("seen", np.float32, n, m // self.K), np.where(there, sums[rows], 0.0)
        )

    def close(self) -> None:
        """Free everything."""
        for handle in (self._graphs, self._memory, self._host):
            handle.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def strided(b: Builder, name: str, m: int, n: int, stride: int) -> Tensor:
    """Make a leaf F32 [m, n] whose rows are `stride` numbers apart."""
    tensor = b.leaf(F32, (m, n), name)
    tensor.nb[1] = 4 * stride
    tensor.nb[2] = tensor.nb[3] = 4 * stride * n
    return tensor


# Eight rows, twelve that may be in them; 3, 5, 7 and 9 are, and rows 2, 5 and 7 are free.
HELD = {3: 0, 5: 6, 7: 1, 9: 4, 11: 3}
# ids, victims, and the rows that they give
CASES: dict[str, tuple[list[int], list[tuple[int, int]], list[int]]] = {
    "nothing is missing": ([7, 3, 9], [(6, 5), (2, -1)], [1, 0, 4]),
    "some are missing": ([0, 3, 8, 9], [(6, 5), (1, 7)], [6, 0, 1, 4]),
    "all are missing": ([8, 0, 1], [(1, 7), (6, 5), (4, 9)], [1, 6, 4]),
    "rows that hold nothing": ([8, 0, 1], [(5, -1), (2, -1), (7, -1)], [5, 2, 7]),
    "what is needed stays": ([8, 5, 0, 7], [(6, 5), (4, 9), (1, 7), (3, 11)], [4, 6, 3, 1]),
    "needed by a later id": ([8, 11], [(3, 11), (2, -1)], [2, 3]),
    "all that may go is needed": ([5, 8, 7], [(6, 5), (1, 7)], [6, -1, 1]),
    "one is missing twice": ([8, 3, 8, 0, 8], [(6, 5), (1, 7), (2, -1)], [6, 0, 6, 1, 6]),
    "ids outside": ([12, 8, -1, -(2**31), 2**31 - 1, 0], [(6, 5), (1, 7)], [-1, 6, -1, -1, -1, 1]),
    "only ids outside": ([-1, 12, 99], [(6, 5), (2, -1)], [-1, -1, -1]),
    "too few may go": ([8, 0, 3, 1, 0, 1], [(2, -1), (1, 7)], [2, 1, 0, -1, 1, -1]),
    "twice, and none may go": ([8, 8], [(4, 9), (4, 9)], [4, 4]),
    "a single one": ([2], [(7, -1)], [7]),
}  # fmt: skip


def check_case(device: Device, name: str, m: int, pads: tuple[int, int], pinned: bool) -> None:
    """Run one of CASES, three times in one graph, with other bytes each time."""
    ids, victims, expected = CASES[name]
    shape = Shape(len(ids), len(victims), 12, 8, m, *pads)
    lookup, rng = Lookup.of(12, HELD, ids, victims), np.random.default_rng(m)
    with Bench(device, shape, pinned) as bench:
        for _ in range(3):
            bench.fill(rng)
            before = bench.target.copy()
            assert bench.run(lookup) == expected
            if "missing" in name or "single" in name:
                assert name.startswith("nothing") == (before == bench.target).all()


def check_order(device: Device, m: int, pinned: bool) -> None:
    """Assert what is fetched, written out: by the order of ids and of the rows given up."""
    with Bench(device, Shape(6, 5, 12, 8, m), pinned) as bench:
        bench.fill(np.random.default_rng(0))
        source, before = bench.source.copy(), bench.target.copy()
        # 7 is needed, so its row stays; 8 is there twice and fetched once
        victims = [(2, -1), (1, 7), (6, 5), (4, 9), (3, 11)]
        rows = bench.run(Lookup.of(12, HELD, [8, 3, 0, 8, 7, 1], victims))
        assert rows == [2, 0, 6, 2, 1, 4]
        for row, expert in ((2, 8), (6, 0), (4, 1)):
            np.testing.assert_array_equal(bench.target[row], source[expert])
        for row in (0, 1, 3, 5, 7):
            np.testing.assert_array_equal(bench.target[row], before[row])


def check_any(device: Device, n_ids: int, m: int, pinned: bool, n_runs: int) -> None:
    """Run one graph of each size with other ids, tables and rows to give up each time."""
    rng, n_fetched = np.random.default_rng(n_ids), 0
    for n, n_rows, n_victims in ANY:
        shape = Shape(n_ids, n_victims or n_ids, n, n_rows, m, 4, 8)
        with Bench(device, shape, pinned) as bench:
            bench.fill(rng)
            for _ in range(n_runs):
                lookup = random_lookup(rng, shape)
                rows = bench.run(lookup)
                n_fetched += sum(
                    row >= 0 and lookup.table[one] < 0 for one, row in zip(lookup.ids, rows)
                )
    assert n_fetched > 20
