"""Attention over pages on a GPU: against float64 and ggml's op, captured and replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.attn_case import (
    KINDS,
    MODEL,
    PADDING,
    Graph,
    Heads,
    Row,
    chain,
    check_bits,
    error,
    flash_attn,
    in_window,
    make_case,
    mixture,
    moved,
    run,
    same_bits,
    tree,
)
from modelgen.blocks import TYPES

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import ATTN_WORDS, F32, I32, I64, Builder

# The 35B-A3B's, then other sizes and groups: 1 to 16 queries for one head of keys.
HEADS = (
    Heads(), Heads(256, 2, 2), Heads(128, 12, 2), Heads(64, 16, 1), Heads(128, 4, 1),
    Heads(64, 6, 2), Heads(256, 16, 1), Heads(256, 10, 2),
)  # fmt: skip
BOUND = 1e-6  # squared error: values, weights and quantized keys are rounded to half
FLOAT32 = 2e-11  # of sums in float32; measured: up to 1.2e-11, at 30,000 positions


@pytest.mark.parametrize("kind_v", KINDS)
@pytest.mark.parametrize("kind_k", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "-".join(str(n) for n in h))
def test_attention_is_that_of_float64(
    heads: Heads, kind_k: str, kind_v: str, device: Device
) -> None:
    rng = np.random.default_rng(sum(heads))
    for i, n_rows in enumerate((1, 2, 7, 32)):
        rows = mixture(rng, n_rows, (1, 2, 5, 12)[i], 1500)
        case = make_case(rng, rows, heads, (kind_k, kind_v), (64, 16, 256, 32)[i])
        got, expected = run(device, case, strided=i % 2 == 1), case.expected()
        for r, row in enumerate(rows):
            assert error(got[r], expected[r]) < BOUND, (n_rows, r, row)


@pytest.mark.parametrize("n_rows", [*range(1, 18), 24, 31, 32])
def test_any_number_of_rows(n_rows: int, device: Device) -> None:
    """Chains and trees of one sequence, single rows of many: all widths of the kernel."""
    rng = np.random.default_rng(n_rows)
    for rows in (
        chain(0, 700, n_rows),
        tree(rng, 0, 700, n_rows),
        [chain(i, int(rng.integers(0, 2500)), 1)[0] for i in range(n_rows)],
    ):
        case = make_case(rng, rows)
        assert error(run(device, case), case.expected()) < BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS[:4], ids=lambda h: "-".join(str(n) for n in h))
def test_the_error_is_at_most_that_of_ggmls_op(heads: Heads, kind: str, device: Device) -> None:
    rng = np.random.default_rng(1)
    for n_past, loud in ((255, 1.0), (4000, 1.0), (4000, 6.0), (30000, 1.0)):
        case = make_case(rng, chain(0, n_past, 4), heads, (kind, kind), 256, loud=loud)
        got, expected = run(device, case), case.expected()
        upstream = np.stack([flash_attn(device, case, i) for i in range(4)])
        assert error(got, expected) <= max(error(upstream, expected), FLOAT32), (n_past, loud)


ENDS = (1, 15, 16, 17, 32, 33, 127, 128, 129, 511, 512, 513, 2047, 2049, 8191, 8193, 32767, 32769)


@pytest.mark.parametrize("n_keys", [*ENDS, 131071, 131073, 262144])
def test_contexts_may_end_anywhere(n_keys: int, device: Device) -> None:
    """Around the ends of splits, tiles and pages."""
    heads = Heads(256, 8, 1) if n_keys < 100000 else Heads(64, 8, 1)
    case = make_case(
        np.random.default_rng(n_keys), chain(0, n_keys - 1, 1), heads, page_size=256, spare_pages=0
    )
    assert error(run(device, case), case.expected()) < BOUND


def test_many_rows_of_a_long_context(device: Device) -> None:
    rng = np.random.default_rng(2)
    for rows in (chain(0, 140000, 9), tree(rng, 0, 140000, 32)):
        case = make_case(rng, rows, Heads(64, 8, 1), ("Q8_0", "Q8_0"), 256)
        assert error(run(device, case), case.expected()) < BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS[:4], ids=lambda h: "-".join(str(n) for n in h))
def test_the_bits_of_a_row_depend_on_its_keys_alone(
    heads: Heads, kind: str, device: Device
) -> None:
    """Not on the rows beside it, nor on padding, pages, or where the committed ones end."""
    rng = np.random.default_rng(3)
    for rows in (mixture(rng, 32, 10, 3000), [*tree(rng, 0, 2500, 27), *chain(1, 600, 5)]):
        case = make_case(rng, rows, heads, (kind, kind), 32)
        assert same_bits(run(device, case), run(device, case))
        check_bits(device, case, rng, 12)


# gpt-oss, and windows that are divided into few and into many splits of other sizes.
WINDOWS = ((Heads(64, 64, 8), 128), (Heads(64, 8, 1), 1), (Heads(128, 16, 8), 700), (MODEL, 2500))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "window"), WINDOWS)
def test_windows_in_rings_and_sinks(heads: Heads, window: int, kind: str, device: Device) -> None:
    """Right, about as far off as ggml's op, and the bits of a row in any company."""
    rng = np.random.default_rng(window)
    n_ring = -(-(window + 40) // 32) + 1
    for rows in (
        mixture(rng, 32, 10, 3000),
        [*tree(rng, 0, 2500, 27), *chain(1, window, 5)],
        [*chain(0, 992, 32), *chain(0, 1024, 32)],
        chain(0, 1023, 1),
    ):
        case = in_window(rng, make_case(rng, rows, heads, (kind, kind), 32), window, n_ring)
        got, expected = run(device, case), case.expected()
        assert error(got, expected) < BOUND
        i = next(i for i, row in enumerate(rows) if row.n_keys)
        upstream = error(flash_attn(device, case, i), expected[i])
        assert error(got[i], expected[i]) <= max(1.25 * upstream, FLOAT32)  # of one row, by chance
        check_bits(device, case, rng, 12)


def test_sinks_without_a_window(device: Device) -> None:
    rng = np.random.default_rng(11)
    for loud in (1.0, 30.0):  # the sink has most of the weight of some heads
        case = make_case(rng, mixture(rng, 32, 10, 3000), WINDOWS[0][0], page_size=32)
        case = in_window(rng, case, 0, loud=loud)
        assert error(run(device, case), case.expected()) < BOUND
        check_bits(device, case, rng, 6)


def shared(rng: np.random.Generator) -> dict[str, list[Row]]:
    """Return rows that have splits in common, at their ends too, and some that only seem to."""
    once = tree(rng, 0, 130, 16)
    return {
        "a chain": chain(0, 77, 32),
        "a chain within one split": chain(0, 1, 7),
        "a chain over two sizes of splits": chain(0, 2035, 32),
        "the same rows twice": [*once, *once],
        "branches of one row": [Row(0, 100, (0, *((i,) if i else ()))) for i in range(32)],
        "rows without a path": [Row(0, 96, ()), *chain(0, 96, 3), Row(0, 96, ()), PADDING],
        "paths that part and meet": [Row(0, 60, (i % 3, 3, 4, 5 + i)[: 1 + i]) for i in range(12)],
        "other ends of what is committed": [*chain(0, 64, 4), *chain(0, 65, 4), *chain(1, 64, 4)],
    }


@pytest.mark.parametrize("what", shared(np.random.default_rng(0)))
@pytest.mark.parametrize("heads", HEADS[::3], ids=lambda h: "-".join(str(n) for n in h))
def test_rows_that_share_splits_have_the_bits_of_rows_alone(
    heads: Heads, what: str, device: Device
) -> None:
    rng = np.random.default_rng(6)
    rows = shared(rng)[what]
    for kinds in (("F16", "F16"), ("Q8_0", "Q4_0")):
        case = make_case(rng, rows, heads, kinds, 16)
        together = run(device, case)
        assert error(together, case.expected()) < BOUND
        for i, row in enumerate(rows):
            if row.n_keys:
                assert same_bits(run(device, moved(case.take([i]), rng))[0], together[i]), row


def test_a_captured_graph_takes_other_lengths(device: Device) -> None:
    """One graph, captured after its first runs, over a pool that all cases share."""
    rng = np.random.default_rng(4)
    longest = make_case(rng, [Row(i, 3000, (0,)) for i in range(8)], page_size=64)
    with Graph(device, longest) as graph:
        for n_past in (3000, 3000, 3000, 0, 1, 31, 512, 700, 2047, 2048, 2999, 5):
            rows = [Row(i, max(0, n_past - 40 * i), (0,)) for i in range(7)] + [PADDING]
            case = replace(longest, rows=tuple(rows))
            got = graph.run(case)
            assert error(got, case.expected()) < BOUND and not got[7].any()
            assert same_bits(got, run(device, case))


def test_the_op_reads_what_its_graph_has_just_written(device: Device) -> None:
    """Keys of the newest rows are written by the kernel before it; a sum follows it at once."""
    rng = np.random.default_rng(5)
    case = make_case(rng, chain(0, 333, 8), Heads(64, 8, 2), page_size=16)
    index = np.array([case.pool_rows(row)[-1] for row in case.rows], np.int64)
    newest = case.k[index].view(np.float16).astype(np.float32)
    case.k[index] = 0xFF  # not a number, until it is written
    with Context(64, 64) as context:
        b = Builder(context, 64)
        data = {
            b.leaf(F32, (64, 8, 8), "q"): case.q,
            b.leaf(TYPES["F16"].ggml_id, (128, len(case.k)), "k"): case.k,
            b.leaf(TYPES["F16"].ggml_id, (128, len(case.v)), "v"): case.v,
            b.leaf(I32, case.pages.shape[::-1], "pages"): case.pages,
            b.leaf(I32, (ATTN_WORDS, 8), "rows"): case.words(),
            b.leaf(F32, (128, 8), "new"): newest,
            b.leaf(I64, (8,), "index"): index,
        }
        q, k, v, pages, rows, new, at = data
        b.expand(b.set_rows(k, new, at))
        out = b.paged_attn(q, k, v, pages, rows, 16, case.scale)
        twice = b.expand(b.add(out, out))
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for _ in range(20):
                for tensor, array in data.items():
                    numbers = np.ascontiguousarray(array)
                    C.ggml_backend_tensor_set(tensor, ffi.from_buffer(numbers), 0, numbers.nbytes)
                device.check(C.mg_launch(device.compute.ptr, b.graph, ffi.NULL, 0), "graph")
                device.synchronize()
                got = np.empty(case.q.shape, np.float32)
                C.ggml_backend_tensor_get(twice, ffi.from_buffer(got), 0, got.nbytes)
                whole = replace(case, k=case.k.copy())
                whole.k[index] = newest.astype(np.float16).view(np.uint8)
                assert error(got / 2, whole.expected()) < BOUND


def test_what_no_kernel_computes_is_refused(device: Device) -> None:
    """Heads of other sizes, and more than 16 queries for one head of keys."""
    with Context(64, 64) as context:
        b = Builder(context, 64)

        def supported(d: int, n_head: int) -> bool:
            op = b.paged_attn(
                b.leaf(F32, (d, n_head, 1), "q"),
                *(b.leaf(TYPES["F16"].ggml_id, (d, 64), name) for name in "kv"),
                b.leaf(I32, (4, 1), "pages"), b.leaf(I32, (ATTN_WORDS, 1), "rows"), 16, 1.0,
            )  # fmt: skip
            return bool(C.ggml_backend_supports_op(device.compute.ptr, op))

        assert [supported(d, 16) for d in (64, 128, 256)] == [True] * 3
        assert not supported(96, 2) and not supported(256, 32)
