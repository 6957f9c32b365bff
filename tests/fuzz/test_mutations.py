"""Random damage to a well-formed file: an error or a model, never a crash, a hang or a flood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.ggufbytes import Shape, T, kv, kv_array, model_file, u32, u64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Open = Callable[[Path], dict[str, Any]]
PAIRS: dict[str, bytes | None] = {
    "general.alignment": kv("general.alignment", T.UINT32, 32),
    "general.tags": kv_array("general.tags", T.STRING, ["a", "b"]),
    "x.flags": kv_array("x.flags", T.BOOL, [True, False]),
}
FILE = model_file(Shape(n_nextn=1), PAIRS)
WHOLE = FILE.build()
HEADER = len(FILE.header())
EDGES = [0, 1, 7, 8, 0x7F, 0x80, 0xFF, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1]

# Most damage goes where the structure is; the rest anywhere.
position = st.one_of(st.integers(0, HEADER), st.integers(0, len(WHOLE)))
step = st.one_of(
    st.tuples(st.just("set"), position, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("set"), position, st.sampled_from(EDGES).map(u64)),
    st.tuples(st.just("set"), position, st.sampled_from(EDGES).map(lambda n: u32(n & 0xFFFFFFFF))),
    st.tuples(st.just("insert"), position, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("delete"), position, st.integers(1, 64)),
    st.tuples(st.just("repeat"), position, st.integers(1, 4096)),
    st.tuples(st.just("cut"), position, st.none()),
)


def damage(raw: bytes, steps: list[tuple[str, int, Any]]) -> bytes:
    out = bytearray(raw)
    for what, at, arg in steps:
        if what == "set":
            out[at : at + len(arg)] = arg
        elif what == "insert":
            out[at:at] = arg
        elif what == "delete":
            del out[at : at + arg]
        elif what == "repeat":
            out[at:at] = out[at : at + arg]
        else:
            del out[at:]
    return bytes(out)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, min_size=1, max_size=4))
def test_damage_gives_an_error_or_a_model(
    open_in_child: Open, target: Path, steps: list[tuple[str, int, Any]]
) -> None:
    target.write_bytes(damage(WHOLE, steps))
    result = open_in_child(target)
    assert result.get("crash") is None and result["status"] == 0, result
    assert result["seconds"] < 5 and result["max_rss_bytes"] < 400 << 20, result
    if not result["opened"]:
        assert result["code"] == 3 and result["message"].isprintable(), result
        assert result["message"].startswith(str(target)), result


@pytest.fixture(scope="module", params=["dflash", "dflash-draft", "safetensors"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny drafter to damage."""
    folder = tmp_path_factory.mktemp("draft")
    sizes = {"n_vocab": 512, "mask_id": 500, "n_embd": 32, "n_ff": 32, "head_dim": 8}
    changes: dict[str, Any] = {**sizes, "target_layers": (1,)}
    if request.param != "dflash-draft":
        changes = sizes | {"markov_rank": 32, "n_vocab_draft": 32}
    path = write_small(folder, request.param, "BF16", **changes)
    return path.rename(folder / f"draft{path.suffix}")


def test_a_damaged_drafter_gives_an_error_or_a_drafter(open_in_child: Open, drafter: Path) -> None:
    raw = drafter.read_bytes()
    config = drafter.with_name("config.json")
    text = config.read_bytes() if config.exists() else b""
    n_header = 2400 if text else raw.index(b"tokenizer.ggml") if b"tokenizer.ggml" in raw else 4000
    rng = np.random.default_rng(11)
    n_opened = 0
    for turn in range(150):
        steps = []
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, n_header))
            kind = rng.choice(
                ["set", "insert", "delete", "repeat", "cut"], p=[0.6, 0.1, 0.1, 0.1, 0.1]
            )
            args = {"set": rng.bytes(int(rng.integers(1, 9))), "insert": rng.bytes(5), "cut": None}
            steps.append((str(kind), at, args.get(str(kind), 40)))
        if text and turn % 2:
            config.write_bytes(damage(text, [(k, at % len(text), arg) for k, at, arg in steps]))
        else:
            drafter.write_bytes(damage(raw, steps))
        result = open_in_child(drafter)
        assert result.get("crash") is None and result["status"] == 0, result
        assert result["seconds"] < 5 and result["max_rss_bytes"] < 400 << 20, result
        n_opened += result["opened"]
        if not result["opened"]:
            assert result["code"] == 3 and result["message"].isprintable(), result
            assert result["message"].startswith(str(drafter.parent)), result
        drafter.write_bytes(raw)
        if text:
            config.write_bytes(text)
    assert n_opened < 120
