"""Routing traces: the file, its statistics, and generated ones against published figures."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moegraph.errors import ConfigError, RequestError
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape, router_shape
from moegraph.placement.trace import Trace, TraceRecorder, read_trace, trace_stats, write_trace

SHAPE = RouterShape(3, 16, 2, "0123456789abcdef")
BIG = RouterShape(40, 256, 8)


def small_trace(n_tokens: int = 20, shape: RouterShape = SHAPE) -> Trace:
    trace = generate_trace(shape, n_tokens, seed=4)
    return Trace(shape, trace.ids, min(5, n_tokens), "a test")


def explicit(rows: list[list[int]], n_expert: int = 8) -> Trace:
    """A trace of one layer."""
    ids = np.array(rows, dtype=np.uint8)[:, None, :]
    return Trace(RouterShape(1, n_expert, ids.shape[2]), ids)


@pytest.mark.parametrize("shape", [SHAPE, RouterShape(2, 300, 3), RouterShape(1, 1, 1)])
@pytest.mark.parametrize("n_tokens", [0, 1, 20])
def test_a_file_gives_back_what_was_written(
    tmp_path: Path, shape: RouterShape, n_tokens: int
) -> None:
    trace = small_trace(n_tokens, shape)
    write_trace(tmp_path / "t", trace)
    back = read_trace(tmp_path / "t")
    assert (back.shape, back.n_prompt, back.source) == (shape, trace.n_prompt, "a test")
    assert back.sha256 == trace.sha256
    assert back.ids.dtype == (np.uint8 if shape.n_expert <= 256 else np.uint16)
    assert (back.ids == trace.ids).all()
    assert [p.name for p in tmp_path.iterdir()] == ["t"], "no temporary file stays"


def test_a_dense_layer_counts_for_nothing(tmp_path: Path) -> None:
    recorder, ids = TraceRecorder(SHAPE, [0, 20, 30]), small_trace().ids
    for row in ids.astype(np.int32):
        for il in (1, 2):
            recorder(il, row[il])
    trace = recorder.trace(3, "")
    write_trace(tmp_path / "t", trace)
    assert read_trace(tmp_path / "t").slot_bytes == (0, 20, 30)
    assert (trace.ids[:, 1:] == ids[:, 1:]).all() and (trace.ids[:, 0] == [0, 1]).all()
    assert not trace.counts()[0].any() and trace.counts()[1:].sum() == 20 * 4
    routers = Trace(RouterShape(2, 16, 2), ids[:, 1:], 3)
    assert replace(trace_stats(trace), sha256="") == replace(trace_stats(routers), sha256="")


def test_sizes_of_experts_are_kept_and_older_files_have_none(tmp_path: Path) -> None:
    trace = replace(small_trace(), slot_bytes=(10, 20, 30))
    write_trace(tmp_path / "t", trace)
    assert read_trace(tmp_path / "t").slot_bytes == (10, 20, 30)
    write_trace(tmp_path / "t", small_trace())
    assert read_trace(tmp_path / "t").slot_bytes == ()
    data = edited(lambda fields: fields.pop("slot_bytes"))((tmp_path / "t").read_bytes())
    (tmp_path / "old").write_bytes(data[:8] + b"\1" + data[9:])
    old = read_trace(tmp_path / "old")
    assert old.slot_bytes == () and (old.ids == trace.ids).all()
    recorder = TraceRecorder(SHAPE, [1, 2, 3])
    assert recorder.trace(0, "").slot_bytes == (1, 2, 3)


def edited(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    """Return a damage that changes the header and keeps its length field right."""

    def damage(data: bytes) -> bytes:
        length = struct.unpack_from("<I", data, 12)[0]
        fields = json.loads(data[16 : 16 + length])
        change(fields)
        header = json.dumps(fields).encode()
        return data[:12] + struct.pack("<I", len(header)) + header + data[16 + length :]

    return damage


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "not a routing trace"),
    "another file": (lambda d: b"GGUF" + d[4:], "not a routing trace"),
    "cut in the prefix": (lambda d: d[:10], "not a routing trace"),
    "cut in the header": (lambda d: d[:40], "cut off or too long"),
    "cut in the ids": (lambda d: d[:-1], "its header says"),
    "something after it": (lambda d: d + b"x", "its header says"),
    "format 3": (lambda d: d[:8] + b"\3" + d[9:], "trace format 3; this moegraph reads formats 1"),
    "sizes of two layers": (edited(lambda f: f.update(slot_bytes=[1, 2])), "list of 3 sizes"),
    "a size of nothing": (edited(lambda f: f.update(slot_bytes=[0, 0, 0])), "list of 3 sizes"),
    "sizes in words": (edited(lambda f: f.update(slot_bytes="big")), "list of 3 sizes"),
    "giant header": (lambda d: d[:12] + b"\xff\xff\xff\xff" + d[16:], "4.00 GiB is cut off"),
    "no JSON": (lambda d: d[:16] + b"[" + d[17:], "not a JSON object"),
    "a list": (lambda d: d[:12] + struct.pack("<I", 2) + b"[]", "not a JSON object"),
    "deep JSON": (lambda d: d[:12] + struct.pack("<I", 60000) + b"[" * 60000, "not a JSON object"),
    "id flipped": (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "do not match their sha256"),
    "n_expert grown": (edited(lambda f: f.update(n_expert=1000)), "its header says"),
    "n_expert too small": (edited(lambda f: f.update(n_expert=3)), "names expert"),
    "no n_layer": (edited(lambda f: f.pop("n_layer")), "does not describe a router"),
    "n_layer true": (edited(lambda f: f.update(n_layer=True)), "does not describe a router"),
    "n_layer -3": (edited(lambda f: f.update(n_layer=-3)), "does not describe a router"),
    "more used than there are": (edited(lambda f: f.update(n_expert_used=17)), "does not describe"),
    "model a number": (edited(lambda f: f.update(model=1)), "does not describe a router"),
    "source a number": (edited(lambda f: f.update(source=1)), "does not describe a router"),
    "n_tokens huge": (edited(lambda f: f.update(n_tokens=1 << 60)), "n_tokens is 11529215046"),
    "n_tokens text": (edited(lambda f: f.update(n_tokens="20")), "n_tokens is '20'"),
    "n_prompt beyond": (edited(lambda f: f.update(n_prompt=21)), "n_prompt is 21; allowed: 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.trace"
    write_trace(path, small_trace())
    damage, say = DAMAGES[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RequestError) as caught:
        read_trace(path)
    assert say in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_that_chose_an_expert_twice_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", explicit([[1, 2], [3, 3]]))
    with pytest.raises(RequestError, match="same expert twice"):
        read_trace(tmp_path / "t")


def test_unreadable_and_unwritable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere: cannot read the trace: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot write"):
        write_trace(tmp_path / "none" / "t", small_trace())


def test_a_pipe_or_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """A superuser's `-o /dev/null` must not put a file in its place."""
    path, trace = tmp_path / "pipe", small_trace()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_trace(path, trace)
    copy = tmp_path / "copy"
    copy.write_bytes(os.read(reader, 1 << 16))
    os.close(reader)
    assert path.is_fifo() and read_trace(copy).sha256 == trace.sha256
    assert sorted(os.listdir(tmp_path)) == ["copy", "pipe"]


def test_a_file_that_is_replaced_keeps_its_permissions_and_the_links_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    link.symlink_to("a")
    for n_tokens, mode in ((5, 0o600), (7, 0o640)):
        write_trace(link, small_trace(n_tokens))
        assert read_trace(path).n_tokens == n_tokens and link.is_symlink()
        path.chmod(mode)
    write_trace(link, small_trace(9))
    assert path.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path).count("a") == 1


@pytest.mark.parametrize("guessed", [False, True])
def test_a_planted_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guessed: bool
) -> None:
    """Whoever may write to the folder must not choose which file is overwritten."""
    folder, victim = tmp_path / "shared", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    names = [f".a.trace.{os.getpid()}"]
    if guessed:
        monkeypatch.setattr("moegraph.placement.trace.secrets.token_hex", lambda n: "0" * n)
        names.append(".moegraph-00000000")
    for name in names:
        (folder / name).symlink_to(victim)
    if guessed:
        with pytest.raises(ConfigError, match="a.trace: cannot write: File exists"):
            write_trace(folder / "a.trace", small_trace())
    else:
        write_trace(folder / "a.trace", small_trace())
        assert not (folder / "a.trace").is_symlink()
    assert victim.read_text() == "precious" and all((folder / n).is_symlink() for n in names)


def test_a_new_file_has_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_trace(tmp_path / "a", small_trace())
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == ["a"]


def test_traces_of_another_model_are_refused() -> None:
    SHAPE.require(RouterShape(3, 16, 2, "0123456789abcdef"), "t")
    RouterShape(3, 16, 2).require(SHAPE, "a generated trace fits every model of its shape")
    with pytest.raises(RequestError, match="t: the trace is of a model with 3 layers of 16 exper"):
        SHAPE.require(BIG, "t: the trace")
    with pytest.raises(RequestError, match="another router .0123456789abcdef; this model: ffff"):
        SHAPE.require(RouterShape(3, 16, 2, "ffff"), "t")


def test_the_fingerprint_is_that_of_first_and_last_router() -> None:
    def shape_of(changed: str = "") -> RouterShape:
        routers = {f"blk.{il}.ffn_gate_inp.weight": bytes([il] * 64) for il in range(3)}
        if changed:
            routers[changed] = bytes(64)[:-1] + b"x"
        hp = SimpleNamespace(n_layer=3, n_expert=16, n_expert_used=2, routed_layers=[0, 1, 2])
        model = SimpleNamespace(
            hparams=hp, tensors={name: name for name in routers},
            map=lambda name: np.frombuffer(routers[name], np.uint8),
        )  # fmt: skip
        return router_shape(model)

    shape = shape_of()
    assert shape.sizes == (3, 16, 2) and len(shape.model) == 16
    assert shape_of("blk.1.ffn_gate_inp.weight") == shape
    for il in (0, 2):
        other = shape_of(f"blk.{il}.ffn_gate_inp.weight")
        assert other.sizes == shape.sizes and other.model != shape.model
