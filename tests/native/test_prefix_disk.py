"""Beginnings of prompts on disk: they outlive the engine, and what is damaged is not used."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import write_small
from helpers.patience import PATIENCE_S
from helpers.reading import read
from helpers.shared import prompt

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ConfigError
from moegraph.passes import prefixes
from moegraph.passes.prefixdisk import PrefixDisk
from moegraph.passes.prefixfile import (
    DamagedFile,
    Head,
    Widths,
    read_head,
    read_rows,
    read_states,
    write_file,
)

Open = Callable[..., Engine]
Filled = Callable[[Path], tuple[np.ndarray, np.ndarray]]
ONE = {"cpu_reference": True, "n_ctx": 1024, "n_ubatch": 128, "cache_ram": 64}
GIB = 1 << 30
WIDTHS = Widths([], {}, 0)


@pytest.fixture(autouse=True)
def every_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts have marks near each other."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)


def cold(engine: Engine, ids: np.ndarray) -> np.ndarray:
    engine.reset()
    return engine.prefill(ids).require_logits()[-1]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


def fill(engine: Engine, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Have an engine save two prompts that begin alike, and end; return them."""
    engine.keep_prefixes(folder, GIB)
    ids, other = prompt(engine, 500), prompt(engine, 200, seed=1)
    second = np.concatenate([ids[:200], other])
    read(engine, 0, ids, 200, 450)
    read(engine, 0, second, 200, 350)
    assert files(folder) == []  # memory has room for all
    engine.close()
    return ids, second


@pytest.fixture(scope="module")
def filled(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """Return a function that makes a folder as an engine with ONE leaves it; see `fill`."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_WORTH", 1)
        ids, second = fill(loaded(model_path("legacy32")), folder)

    def copied(to: Path) -> tuple[np.ndarray, np.ndarray]:
        shutil.copytree(folder, to, dirs_exist_ok=True)
        return ids, second

    return copied


def loaded(model: Path) -> Engine:
    return Engine.load(model, EngineConfig(device="cpu", n_threads=1, **ONE))


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_another_process_goes_on_where_this_one_was(
    open_engine: Open, tmp_path: Path, kv: str
) -> None:
    settings = {"type_k": kv, "type_v": kv}
    ids, second = fill(open_engine(**ONE, **settings), tmp_path)
    assert len(files(tmp_path)) == 4  # the last one is what the sequence held at the end
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))
    # the rows of the beginning that both have were written once
    runs = sorted((head.first, head.n_tokens) for head in map(read_head, files(tmp_path)))
    assert runs == [(0, 200), (200, 150), (200, 250), (350, 50)]
    engine, alone = open_engine(**ONE, **settings), open_engine(**ONE, **settings)
    engine.keep_prefixes(tmp_path, GIB)
    assert engine.drain_messages() == [] and engine.prefixes.store.disk.n_places == 4
    for asked, n_known in ((ids[:480], 450), (second[:380], 350), (np.append(ids[:300], 5), 200)):
        assert engine.prefixes.n_saved(asked) == n_known
        logits, n = read(engine, 0, asked)
        assert n == n_known
        np.testing.assert_array_equal(logits, cold(alone, asked))
        engine.reset()
    assert engine.prefixes.store.n_bytes <= 64 << 20


@pytest.mark.parametrize("change", [
    {"type_k": "q8_0"}, {"cpu_reference": False}, {"preset": "float32"}, {"device": "cpu,cpu"},
    {"deterministic": True},
])  # fmt: skip
def test_other_models_and_settings_use_nothing(
    open_engine: Open, tmp_path: Path, filled: Filled, change: dict[str, Any]
) -> None:
    ids, _ = filled(tmp_path)
    settings = {**ONE, **change}
    engine = open_engine(settings.pop("preset", "legacy32"), **settings)
    engine.keep_prefixes(tmp_path, GIB)
    line = engine.drain_messages()[-1]
    assert line == f"{tmp_path}: 4 files are of another model or other settings; not used"
    assert engine.prefixes.resume(0, ids) == 0 and len(files(tmp_path)) == 4


def test_the_context_may_differ(open_engine: Open, tmp_path: Path, filled: Filled) -> None:
    ids, _ = filled(tmp_path)
    engine = open_engine(**{**ONE, "n_ctx": 2048, "n_seq": 2, "n_kv": -1, "n_ubatch": 64})
    engine.keep_prefixes(tmp_path, GIB)
    assert engine.prefixes.resume(1, ids) == 450


def places(path: Path) -> dict[str, int]:
    """Return a byte of each part of a file, by name."""
    head, size = read_head(path), path.stat().st_size
    return {
        "magic": 3, "header": 60, "rows": size - head.n_states - head.n_rows_bytes // 2 - 20,
        "states": size - 50, "last": size - 1,
    }  # fmt: skip


@pytest.mark.parametrize("part", ["magic", "header", "rows", "states", "last", "short", "empty"])
def test_a_damaged_file_is_not_used_and_costs_one_line(
    open_engine: Open, tmp_path: Path, filled: Filled, part: str
) -> None:
    ids, second = filled(tmp_path)
    [bad] = [path for path in files(tmp_path) if read_head(path).n_tokens == 250]
    data = bytearray(bad.read_bytes())
    if part in ("short", "empty"):
        data = data[: -100 if part == "short" else 0]
    else:
        data[places(bad)[part]] ^= 1
    bad.write_bytes(data)
    engine, alone = open_engine(**ONE), open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    logits, n = read(engine, 0, ids)
    assert n in (0, 200)
    np.testing.assert_array_equal(logits, cold(alone, ids))
    [line] = engine.drain_messages()
    assert line.startswith(f"{bad}: ") and line.endswith("; the file is not used")
    assert not bad.exists()
    assert read(engine, 0, second[:390])[1] == 350


def test_files_of_others_stay(tmp_path: Path) -> None:
    name = f"{'a' * 16}-{'b' * 32}.prefix"
    foreign, fresh, old = (
        tmp_path / n for n in ("foo.prefix", f"{name}.1.part", f"{name}.q_2x.part")
    )
    for path in (foreign, fresh, old):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    disk = PrefixDisk(tmp_path, "m", WIDTHS, GIB)
    disk.close()
    assert disk.messages == [] and sorted(tmp_path.iterdir()) == sorted([foreign, fresh])


def test_without_its_beginning_a_file_goes_too(
    open_engine: Open, tmp_path: Path, filled: Filled
) -> None:
    ids, _ = filled(tmp_path)
    [first] = [path for path in files(tmp_path) if not read_head(path).first]
    first.unlink()
    engine = open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    assert engine.prefixes.store.disk.n_places == 0 and files(tmp_path) == []
    assert engine.prefixes.resume(0, ids) == 0


def test_what_memory_has_no_room_for_comes_back_from_disk(
    open_engine: Open, tmp_path: Path
) -> None:
    engine, alone = open_engine(**{**ONE, "cache_ram": 1}), open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    asked = [prompt(engine, 120, seed=seed) for seed in range(12)]
    for ids in asked:
        read(engine, 0, ids, 100)
        assert engine.prefixes.store.n_bytes <= 1 << 20
    engine.prefixes.store.disk.wait()
    assert engine.prefixes.store.n_places < 12
    for ids in asked[:3]:
        engine.reset()
        logits, n = read(engine, 0, ids)
        assert n == 100 and engine.prefixes.store.n_bytes <= 1 << 20
        np.testing.assert_array_equal(logits, cold(alone, ids))


def test_the_folder_has_a_limit_and_the_latest_stay(open_engine: Open, tmp_path: Path) -> None:
    limit = 3 << 20
    for n_seen in range(2):
        engine = open_engine(**{**ONE, "cache_ram": 1})
        engine.keep_prefixes(tmp_path, limit)
        for seed in range(n_seen * 10, n_seen * 10 + 10):
            read(engine, 0, prompt(engine, 120, seed=seed), 100)
            engine.prefixes.store.disk.wait()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
        engine.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    engine = open_engine(**ONE)
    engine.keep_prefixes(tmp_path, limit)
    known = [engine.prefixes.n_saved(prompt(engine, 120, seed=seed)) for seed in range(20)]
    assert known[19] == 100 and known[0] == 0
    # another model has no use for them, and takes their room when it needs it
    other = open_engine("float32", **{**ONE, "cache_ram": 1})
    other.keep_prefixes(tmp_path, limit)
    for seed in range(8):
        read(other, 0, prompt(other, 120, seed=seed), 100)
        other.prefixes.store.disk.wait()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    assert other.prefixes.store.disk.n_places > 0


TINY = "a" * 16, Widths([8], {}, 4)


def write_tiny(folder: Path, token: int, parent: str = "", first: int = 0) -> Head:
    """Write a file of one token for the model TINY; return what it says."""
    tokens = np.array([token], np.int32)
    head = Head(TINY[0], parent, first, 1, [[1, 8]], {}, 4, tokens)
    rows, states = [np.zeros((1, 8), np.uint8)], np.zeros(4, np.uint8)
    write_file(folder / f"{TINY[0]}-{head.key}.prefix", head, rows, states)
    return head


def test_what_others_go_on_from_is_deleted_after_them(tmp_path: Path) -> None:
    """Of five files, the oldest is where the latest goes on."""
    heads = [write_tiny(tmp_path, token) for token in range(4)]
    heads.append(write_tiny(tmp_path, 4, heads[0].key, 1))
    paths = [tmp_path / f"{TINY[0]}-{head.key}.prefix" for head in heads]
    for used, path in enumerate(paths):
        os.utime(path, (used, used))
    limit = sum(head.n_bytes for head in heads)
    for gone in (1, 2, 3, 4, 0):
        limit -= heads[gone].n_bytes
        before = {*files(tmp_path)}
        PrefixDisk(tmp_path, *TINY, limit).close()
        assert before - {*files(tmp_path)} == {paths[gone]}


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_begins_where_its_parent_ends(tmp_path: Path, first: int) -> None:
    parent = write_tiny(tmp_path, 1)
    write_tiny(tmp_path, 2, parent.key, 1)
    assert PrefixDisk(tmp_path, *TINY, GIB).n_places == 2
    write_tiny(tmp_path, 3, parent.key, first)
    write_tiny(tmp_path, 4, "", 1)
    disk = PrefixDisk(tmp_path, *TINY, GIB)
    assert disk.n_places == 2 == len(files(tmp_path))
    assert [entry.end for entry in disk.find(np.array([1, 2, 3], np.int32))] == [1, 2]


def test_a_disk_that_fails_costs_one_line(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**{**ONE, "cache_ram": 1})
    engine.keep_prefixes(tmp_path, GIB)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for seed in range(8):
        read(engine, 0, prompt(engine, 120, seed=seed), 100)
        engine.prefixes.store.disk.wait()
    [line] = engine.drain_messages()
    assert "cannot be kept on disk any more: [Errno 28] No space left" in line
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="file: cannot keep a cache there"):
        PrefixDisk(file, "x", WIDTHS, GIB)


def test_rows_of_drafters_are_kept_too(open_engine: Open, tmp_path: Path) -> None:
    chosen = {**ONE, "spec": "dflash", "draft": str(write_small(tmp_path, windows="ff"))}
    folder = tmp_path / "kept"
    engine = open_engine(**chosen)
    engine.keep_prefixes(folder, GIB)
    ids = prompt(engine, 500)
    list(engine.generate(ids, max_tokens=1, text=False, reuse=True, marks=(200, 450)))
    engine.close()
    assert len(files(folder)) == 3
    for path in files(folder):
        head = read_head(path)
        rows, drafted = read_rows(path, head)
        assert all(len(part) == head.n_tokens for part in rows)
        assert [len(part) for part in drafted["dflash"]] == [head.n_tokens] * 4
    engine = open_engine(**chosen)
    engine.keep_prefixes(folder, GIB)
    assert engine.prefixes.resume(0, ids) == 450
    [drafter] = engine._loaded.drafters
    assert (drafter._rings.spans[0].first, drafter._rings.spans[0].n_past) == (0, 450)


def test_no_fuzzed_header_passes(open_engine: Open, tmp_path: Path, filled: Filled) -> None:
    filled(tmp_path)
    path, rng = files(tmp_path)[0], np.random.default_rng(0)
    data, head = path.read_bytes(), read_head(path)
    n_bytes = data.index(head.text) + len(head.text) + 4 * head.n_tokens
    for _ in range(300):
        bad = bytearray(data)
        for at in rng.integers(0, n_bytes, rng.integers(1, 4)):
            bad[at] = int(rng.integers(0, 256))
        if bad == data:
            continue
        path.write_bytes(bad)
        with pytest.raises(DamagedFile):
            read_head(path)


Change = Callable[[Head, list[np.ndarray], np.ndarray], tuple[Head, list[np.ndarray], np.ndarray]]


def other_rows(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Change:
    """Return a change of a file's KV rows, with a header that tells their shapes."""

    def changed(head: Head, rows: list[np.ndarray], states: np.ndarray) -> Any:
        rows = change(rows)
        return replace(head, rows=[list(part.shape) for part in rows]), rows, states

    return changed


def other_states(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda head, rows, states: (
        replace(head, n_states=len(change(states))), rows, change(states)
    )  # fmt: skip


FORGED: dict[str, Change] = {
    "narrow rows": other_rows(lambda rows: [part[:, :8] for part in rows]),
    "wide rows": other_rows(lambda rows: [np.repeat(part, 2, 1) for part in rows]),
    "one narrow cache": other_rows(lambda rows: [*rows[:-1], rows[-1][:, 1:]]),
    "one position": other_rows(lambda rows: [part[:1] for part in rows]),
    "a position less": other_rows(lambda rows: [part[1:] for part in rows]),
    "a position more": other_rows(lambda rows: [part[[0, *range(len(part))]] for part in rows]),
    "a short cache": other_rows(lambda rows: [rows[0], rows[1][1:], *rows[2:]]),
    "a cache less": other_rows(lambda rows: rows[1:]),
    "no caches": other_rows(lambda rows: []),
    "a cache more": other_rows(lambda rows: [*rows, rows[0]]),
    "short states": other_states(lambda states: states[:-4]),
    "no states": other_states(lambda states: states[:0]),
    "long states": other_states(lambda states: np.append(states, states[:4])),
    "states of NaN": other_states(lambda states: np.full(len(states), 255, np.uint8)),
    "a drafter": lambda head, rows, states: (replace(head, drafted={"x": []}), rows, states),
    "half a token": lambda head, rows, states: (
        replace(head, n_tokens=head.n_tokens + 0.0), rows, states
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_whole_file_of_other_shapes_is_not_used(
    open_engine: Open, tmp_path: Path, filled: Filled, change: Change
) -> None:
    """Its hashes are right: it was written so."""
    ids, _ = filled(tmp_path)
    [path] = [path for path in files(tmp_path) if not read_head(path).first]
    head = read_head(path)
    states = np.empty(head.n_states, np.uint8)
    read_states(path, head, states)
    head, rows, states = change(head, read_rows(path, head)[0], states)
    write_file(path, head, rows, states)
    engine, alone = open_engine(**ONE), open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    asked = np.append(ids[:300], 5)
    logits, n = read(engine, 0, asked)
    assert n == 0
    np.testing.assert_array_equal(logits, cold(alone, asked))
    [line] = engine.drain_messages()
    assert line.startswith(f"{path}: ") and line.endswith("; the file is not used")
    assert not path.exists()


def test_a_file_under_another_ones_name_is_not_used(
    open_engine: Open, tmp_path: Path, filled: Filled
) -> None:
    filled(tmp_path)
    one, other = files(tmp_path)[:2]
    other.write_bytes(one.read_bytes())
    engine = open_engine(**ONE)
    engine.keep_prefixes(tmp_path, GIB)
    assert f"{other}: its name is another one's; the file is not used" in engine.drain_messages()


def test_rows_of_a_drafter_have_its_shapes(open_engine: Open, tmp_path: Path) -> None:
    widths = Widths([4], {"d": [8, 6]}, 2)
    head = Head("m", "", 0, 5, [[5, 4]], {}, 2, np.arange(5, dtype=np.int32))
    for drafted in ({}, {"d": [[5, 8], [0, 6]]}, {"d": [[1, 8], [3, 6]]}):
        replace(head, drafted=drafted).require(widths)
    for drafted in ({"e": [[5, 8], [5, 6]]}, {"d": []}, {"d": [[5, 8]]}, {"d": [[6, 8], [5, 6]]},
                    {"d": [[5, 8], [5, 7]]}, {"d": [[5, 8], [5, 6], [5, 6]]}):  # fmt: skip
        with pytest.raises(DamagedFile, match="drafter"):
            replace(head, drafted=drafted).require(widths)


@pytest.mark.parametrize("kept_time", [False, True])
def test_a_model_that_changed_in_place_uses_nothing(
    open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path, kept_time: bool
) -> None:
    """One expert of one tensor is zeroed; the file's size and, perhaps, its time stay."""
    model, folder = tmp_path / "model.gguf", tmp_path / "kept"
    shutil.copyfile(model_path("legacy32"), model)

    def engine() -> Engine:
        found = stack.enter_context(closing(loaded(model)))
        found.keep_prefixes(folder, GIB)
        return found

    with ExitStack() as stack:
        first = engine()
        ids = prompt(first, 300)
        read(first, 0, ids, 200)
        first.close()
        assert engine().prefixes.n_saved(ids) == 200
        status = model.stat()
        with closing(open_model(model)) as file:
            info = file.tensors["blk.2.ffn_up_exps.weight"]
        size = info.nbytes // info.ne[2]
        with open(model, "r+b") as file:
            file.seek(info.offset + 3 * size)
            file.write(bytes(size if kept_time else 1))
        if kept_time:
            os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert model.stat().st_size == status.st_size
        changed = engine()
        assert changed.prefixes.n_saved(ids) == 0
        [line] = changed.drain_messages()
        assert line.endswith("files are of another model or other settings; not used")


def test_a_copy_that_keeps_its_time_uses_all(
    open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path, filled: Filled
) -> None:
    ids, _ = filled(tmp_path / "kept")
    copy = shutil.copy2(model_path("legacy32"), tmp_path / "elsewhere.gguf")
    with closing(loaded(copy)) as engine:
        engine.keep_prefixes(tmp_path / "kept", GIB)
        assert engine.prefixes.n_saved(ids) == 450


def test_another_drafters_file_is_another_cache(open_engine: Open, tmp_path: Path) -> None:
    draft, folder = write_small(tmp_path, windows="ff"), tmp_path / "kept"
    chosen = {**ONE, "spec": "dflash", "draft": str(draft)}
    fill(open_engine(**chosen), folder)
    os.utime(draft, (0, 0))
    engine = open_engine(**chosen)
    engine.keep_prefixes(folder, GIB)
    assert engine.prefixes.store.disk.n_places == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_neither_opened_nor_deleted(
    open_engine: Open, tmp_path: Path, filled: Filled, kind: str
) -> None:
    folder = tmp_path / "kept"
    filled(folder)
    [path] = [path for path in files(folder) if read_head(path).n_tokens == 250]
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    engine = open_engine(**ONE)
    # who waits for the pipe's writer would wait for ever: one comes at last, and says nothing
    writer = threading.Timer(PATIENCE_S, lambda: os.close(os.open(path, os.O_RDWR)))
    writer.start()
    engine.keep_prefixes(folder, GIB)
    writer.cancel()
    [line] = engine.drain_messages()
    assert line.startswith(f"{path}: ") and line.endswith("; the file is not used")
    assert engine.prefixes.store.disk.n_places == 3 and path in folder.iterdir()


def test_no_link_is_followed_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links stand at all names that a half-done file had or could have."""
    head = Head("m", "", 0, 1, [], {}, 3, np.array([5], np.int32))
    victim, target = tmp_path / "victim", tmp_path / "a.prefix"
    victim.write_text("precious")
    names = iter(["planted", "planted", "free"])
    monkeypatch.setattr(tempfile._RandomNameSequence, "__next__", lambda _: next(names))
    for name in ("a.prefix", "a.prefix.planted.part", f"a.prefix.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(victim)
    write_file(target, head, [], np.zeros(3, np.uint8))
    assert victim.read_text() == "precious" and not target.is_symlink()
    assert read_head(target) == head


def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made"
    PrefixDisk(folder, "m", WIDTHS, GIB).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o770, 0o702, 0o1777):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=re.escape(f"(mode {mode:o})")) as caught:
            PrefixDisk(folder, "m", WIDTHS, GIB)
        assert str(caught.value).endswith(f"chmod go-w {folder}")
    folder.chmod(0o755)
    PrefixDisk(folder, "m", WIDTHS, GIB).close()
    if not os.geteuid():  # what root owns is trusted
        os.chown(folder, 7, -1)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"to user {owner}, .* folder of user {owner + 1}"):
        PrefixDisk(folder, "m", WIDTHS, GIB)
