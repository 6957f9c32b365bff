"""Devices of a worker: bits of one engine, and what crosses the connection."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.stages import Stages, assert_same, batches, new_config
from helpers.workers import WorkerProcess, working

from moegraph.arch import ModelFile
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, Builder, Tensor
from moegraph.ggml.remote import RemoteLink
from moegraph.graphs.cache import BuiltGraph, GraphCache

KiB = 1 << 10


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """Yield a worker that lends the CPU."""
    with working() as running:
        yield running


def link_of(device: Device) -> RemoteLink:
    assert device.link
    return device.link


@pytest.mark.parametrize(
    ("preset", "settings", "cuts"),
    [
        ("legacy32", {}, [4]),
        ("legacy32", {"type_k": "q8_0", "type_v": "q4_0"}, []),
        ("float32", {}, [1, 2, 3, 4]),
        ("mini35b", {}, [1, 3]),
    ],
)
def test_stages_on_a_worker_equal_one_engine(
    worker: WorkerProcess, opened: Callable[[str], ModelFile], stack: ExitStack,
    preset: str, settings: dict[str, str], cuts: list[int],
) -> None:  # fmt: skip
    """All kinds of passes; the stages share the connection."""
    file = opened(preset)
    one = Stages(file, [], new_config(**settings), stack)
    cut = Stages(file, cuts, new_config(device=worker.url, **settings), stack)
    for batch, paths in batches(file.hparams.n_vocab):
        assert_same(cut.run(batch), one.run(batch), batch)
        for slot, rows in paths.items():
            for stages in (one, cut):
                stages.runner.commit({slot: rows})


def traffic(link: RemoteLink) -> Any:
    """Return the bytes and graphs that a connection has carried."""
    counts = ffi.new("struct moegraph_rpc_counts *")
    C.moegraph_rpc_count(link._endpoint, counts)
    return counts


def test_a_token_takes_few_bytes_and_no_graph_is_sent_twice(
    worker: WorkerProcess, open_engine: Callable[..., Engine]
) -> None:
    """At depth 4,096 and with half of the layers on the worker; the graph grows with the depth."""
    device, rng = f"cpu,{worker.url}", np.random.default_rng(3)
    engine = open_engine("mini35b", device=device, n_ctx=4352, n_ubatch=512, n_kv=4352)
    link = link_of(engine.stages[1].device)
    ids = rng.integers(0, engine.hparams.n_vocab, 4090).astype(np.int32)
    found: list[Any] = []
    for _ in engine.generate(ids, max_tokens=128, text=False, ignore_eos=True):
        found.append(traffic(link))
    before, after, n = found[32], found[96], 64
    assert after.n_graphs_sent == before.n_graphs_sent
    # a pass may be on its way when its predecessor's token is told
    assert abs(after.n_graphs_stored - before.n_graphs_stored - n) <= 2
    n_bytes = after.n_sent + after.n_received - before.n_sent - before.n_received
    assert 0 < n_bytes / n <= 64 * KiB


def test_connections_that_were_closed_leave_nothing(worker: WorkerProcess) -> None:
    def counts() -> list[int]:
        return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]

    Device(worker.url, 1).close()
    before = counts()
    for _ in range(5):
        device = Device(worker.url, 1)
        device.buffer(1 << 20, "nothing", "").close()
        device.close()
    assert counts() == before


class Scaler:
    """Graphs on a device that multiply a vector of four numbers, `n_nodes` times in all."""

    def __init__(self, device: Device, stack: ExitStack) -> None:
        self.device = device
        self.buffer: Buffer = stack.enter_context(closing(device.buffer(32, "numbers", "")))
        self.graphs = stack.enter_context(closing(GraphCache(device)))
        self.context = stack.enter_context(closing(Context(2)))
        self.source = C.ggml_new_tensor_1d(self.context.ptr, F32, 4)
        self.target = C.ggml_new_tensor_1d(self.context.ptr, F32, 4)
        place(self.buffer, self.source, 0)
        place(self.buffer, self.target, 16)

    def built(self, factor: float, n_nodes: int = 1) -> BuiltGraph:
        def build(b: Builder) -> Tensor:
            x = self.source
            for i in range(n_nodes):
                x = C.ggml_scale(b.context.ptr, x, factor if i == 0 else 1.0)
                b.expand(x)
            b.expand(b.cpy(x, self.target))
            return x

        return self.graphs.get(factor, n_nodes + 8, build)

    def run(self, graph: BuiltGraph, values: np.ndarray) -> np.ndarray:
        C.ggml_backend_tensor_set(self.source, ffi.from_buffer(values), 0, 16)
        self.device.check(C.mg_launch(self.device.compute.ptr, graph.graph, ffi.NULL, 0), "scale")
        found = np.empty(4, np.float32)
        C.ggml_backend_tensor_get(self.target, ffi.from_buffer(found), 0, 16)
        self.device.check_alive()
        return found


@pytest.fixture
def scaler(worker: WorkerProcess, stack: ExitStack) -> Scaler:
    """Return graphs on the worker."""
    return Scaler(stack.enter_context(closing(Device(worker.url, 1))), stack)


def test_a_freed_buffer_takes_only_its_own_graphs(scaler: Scaler, stack: ExitStack) -> None:
    link, values = link_of(scaler.device), np.ones(4, np.float32)
    with ExitStack() as inner:
        other = Scaler(scaler.device, inner)
        mine, its = scaler.built(2.0), other.built(3.0)
        scaler.run(mine, values)
        np.testing.assert_array_equal(other.run(its, values), 3 * values)
    np.testing.assert_array_equal(scaler.run(mine, values), 2 * values)
    assert traffic(link).n_graphs_sent == 2


def test_graphs_that_were_not_used_for_long_make_room(scaler: Scaler) -> None:
    """256 MiB hold four graphs of 75,000 nodes."""
    link, values = link_of(scaler.device), np.ones(4, np.float32)
    graphs = [scaler.built(float(i), 75_000) for i in range(1, 7)]
    for i, graph in enumerate(graphs, 1):
        np.testing.assert_array_equal(scaler.run(graph, values), i * values)
    assert traffic(link).n_graphs_sent == 6
    np.testing.assert_array_equal(scaler.run(graphs[5], values), 6 * values)
    assert traffic(link).n_graphs_sent == 6
    np.testing.assert_array_equal(scaler.run(graphs[0], values), 1 * values)
    assert traffic(link).n_graphs_sent == 7


def test_weights_cross_the_connection_once(tmp_path: Path) -> None:
    """The cache has them by hash; a damaged file is not used."""
    size, rng = 3 << 20, np.random.default_rng(1)
    data = rng.integers(0, 256, size, np.uint8)

    def load(url: str) -> tuple[int, bytes]:
        with ExitStack() as inner:
            device = inner.enter_context(closing(Device(url, 1)))
            buffer = inner.enter_context(closing(device.buffer(size, "weights", "")))
            C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
            context = inner.enter_context(closing(Context(1)))
            tensor = C.ggml_new_tensor_1d(context.ptr, F32, size // 4)
            place(buffer, tensor, 0)
            before = traffic(link_of(device)).n_sent
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, size)
            sent = traffic(link_of(device)).n_sent - before
            back = np.empty(size, np.uint8)
            C.ggml_backend_tensor_get(tensor, ffi.from_buffer(back), 0, size)
            return sent, back.tobytes()

    with working("--cache-dir", tmp_path / "cache") as worker:
        assert load(worker.url)[0] > size
        sent, found = load(worker.url)
        assert sent < KiB
        assert found == data.tobytes()
        (cached,) = (tmp_path / "cache").iterdir()
        cached.write_bytes(cached.read_bytes()[: size // 2])
        sent, found = load(worker.url)
        assert sent > size
        assert found == data.tobytes()


def test_no_expert_may_be_missing_on_a_worker(
    worker: WorkerProcess, opened: Callable[[str], ModelFile], stack: ExitStack
) -> None:
    config = new_config(device=worker.url, policy="lru", miss="stream")
    with pytest.raises(ConfigError, match=r"rpc://127.*all experts"):
        Stages(opened("legacy32"), [], config, stack)
    config = new_config(device=worker.url, mode="layered")
    with pytest.raises(ConfigError, match=r"rpc://127.*one graph"):
        Stages(opened("legacy32"), [], config, stack)


@pytest.mark.parametrize("layers", ["first", "last"])
def test_drafted_text_and_acceptance_are_those_of_one_device(
    worker: WorkerProcess, layers: str
) -> None:
    """The drafter is beside the last layer, wherever that is, and reads outputs of all layers."""
    found = []
    devices = {"first": f"{worker.url},cpu", "last": f"cpu,{worker.url}"}
    for device in ("cpu", devices[layers]):
        config = EngineConfig(
            device=device, n_threads=1, n_ctx=512, n_ubatch=64, spec="dflash", ddtree=True
        )
        with Engine.load("tiny", config) as engine:
            ids = engine.tokenizer.encode(
                "def fibonacci(n):\n    if n < 2:\n        return n\n" * 4
            )
            tokens = [e.token for e in engine.generate(ids, max_tokens=20)]
            stats = engine.spec_stats()
            assert stats
            report = stats.report()
            found.append((tokens, report["drafted"], report["accepted"]))
    assert found[0] == found[1] and found[0][2] > 5


def test_the_mtp_block_is_not_beside_layers_on_a_worker(
    worker: WorkerProcess, open_engine: Callable[..., Engine]
) -> None:
    """It reads embeddings in host memory: refused if asked for, else drafts go without it."""
    with pytest.raises(ConfigError, match="name a device of this machine last"):
        open_engine("mini35b", device=f"cpu,{worker.url}", spec="mtp")
    found = []
    for device in ("cpu", f"{worker.url},cpu"):
        engine = open_engine("mini35b", device=device, spec="mtp", ddtree=True)
        ids = np.arange(60, dtype=np.int32)
        events = list(engine.generate(ids, max_tokens=12, text=False, ignore_eos=True))
        stats = engine.spec_stats()
        assert stats
        found.append(([e.token for e in events], stats.report()["drafted"]))
    assert found[0] == found[1] and found[0][1] > 0


def test_trace_says_that_choices_on_a_worker_are_not_read(tmp_path: Path) -> None:
    args = ["trace", "tiny", "-p", "x", "-o", str(tmp_path / "x.trace")]
    done = subprocess.run(
        [sys.executable, "-m", "moegraph", *args, "--device", "cpu,rpc://127.0.0.1:1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "choices of experts on rpc://127.0.0.1:1 are not read" in done.stderr
