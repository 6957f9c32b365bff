"""The profile of a run: read, added to, never lost, and nowhere that nobody asked for."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.errors import ConfigError, RequestError
from moegraph.placement import profilefile
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile, read_profile
from moegraph.placement.profilefile import ProfileFile, open_profile

SHAPE = RouterShape(2, 4, 2, "abc")
COUNTS = np.array([[8, 0, 1, 1], [0, 5, 5, 0]])


def saved(path: Path, *names: str) -> Path:
    profile = Profile(SHAPE)
    for name in names:
        profile.add(name, COUNTS, 5)
    profile.save(path)
    return path


def test_a_named_file_may_be_new_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    opened = ProfileFile(path, "code", True, SHAPE)
    assert "no profile yet; this run creates it" in opened.warning
    assert opened.demand is None and opened.starts(2) == [(None, None)] * 2
    assert not path.exists(), "nothing is written before the end"
    kept = opened.update(COUNTS)
    assert kept.report() == {
        "path": str(path), "class": "code", "n_tokens": 5, "written": True, "why_not": None,
    }  # fmt: skip
    again = ProfileFile(path, "code", True, SHAPE)
    assert again.warning == "" and again.starts(2)[0][0] == [0, 2, 3, 1]
    again.update(COUNTS)
    assert read_profile(path, SHAPE).classes["code"].n_tokens == 10
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_new_class_fills_from_all_and_keeps_the_others(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", "prose", "code")
    opened = ProfileFile(path, "poems", True, SHAPE)
    assert "no class 'poems' yet (it has: code, prose); all are used" in opened.warning
    assert opened.starts(2)[1][0] == [1, 2, 0, 3]
    opened.update(2 * COUNTS)
    classes = read_profile(path, SHAPE).classes
    assert {name: c.n_tokens for name, c in classes.items()} == {"prose": 5, "code": 5, "poems": 10}


def test_without_a_name_only_a_file_that_is_there_counts(tmp_path: Path) -> None:
    beside = tmp_path / "m.gguf.routing.json"
    assert open_profile("", "", beside, lambda: SHAPE) is None
    assert open_profile("none", "", saved(tmp_path / "x.json", "a"), lambda: SHAPE) is None
    with pytest.raises(ConfigError, match="'code' needs a profile; give --profile"):
        open_profile("", "code", beside, lambda: SHAPE)
    saved(beside, "default")
    opened = open_profile("", "", beside, lambda: SHAPE)
    assert opened is not None and opened.path == beside
    beside.unlink()
    kept = opened.update(COUNTS)
    assert not beside.exists() and "was removed during the run" in kept.why and not kept.warning


def test_what_cannot_be_kept_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        ProfileFile(tmp_path / "none" / "p.json", "", True, SHAPE)
    with pytest.raises(RequestError, match="use 1 to 64 letters"):
        ProfileFile(tmp_path / "p.json", "a b", True, SHAPE)
    with pytest.raises(RequestError, match="cannot read the profile: Is a directory"):
        ProfileFile(tmp_path, "", True, SHAPE)


def test_a_failure_to_write_is_one_line_and_no_exception(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    opened = ProfileFile(saved(folder / "p.json", "a"), "", True, SHAPE)
    (folder / "p.json").write_text("{}")
    kept = opened.update(COUNTS)
    assert "was not updated" in kept.warning and "not a routing profile" in kept.warning
    assert "\n" not in kept.warning and not kept.report()["written"]
    assert (folder / "p.json").read_text() == "{}"
    (folder / "p.json").unlink()
    folder.rmdir()
    assert (
        "is read-only" in opened.update(COUNTS).warning or "no folder" in opened.update(COUNTS).why
    )


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    target = saved(tmp_path / "target.json", "a")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    ProfileFile(link, "a", True, SHAPE).update(COUNTS)
    assert link.is_symlink() and read_profile(target, SHAPE).classes["a"].n_tokens == 10


def test_a_path_that_cannot_even_be_looked_at_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot use it as a profile: File name too long"):
        ProfileFile(tmp_path / ("a" * 300), "", True, SHAPE)
    path = tmp_path / "p.json"
    opened = ProfileFile(path, "", True, SHAPE)
    path.symlink_to(path)
    assert opened.update(COUNTS).warning.startswith("the routing profile was not updated: ")


DAMAGED = [b"{}", b"", b"\xff", b"[" * 100, b"{}," * 40_000, Profile(RouterShape(3, 4, 2, "x"))]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_bad_file_that_was_not_named_is_ignored(tmp_path: Path, content: Any) -> None:
    """It may be anybody's: a run that did not ask for it goes on without it."""
    path = tmp_path / "m.gguf.routing.json"
    if isinstance(content, Profile):
        content.save(path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    opened = open_profile("", "", path, lambda: SHAPE)
    assert opened is not None
    assert opened.demand is None and opened.starts(2) == [(None, None)] * 2
    assert f"is ignored: {path}: " in opened.warning and "--profile none" in opened.warning
    assert "\n" not in opened.warning
    kept = opened.update(COUNTS)
    assert not kept.warning and kept.report()["why_not"].startswith("it was ignored")
    assert path.read_bytes() == before
    for name, class_name in ((str(path), ""), ("", "code")):
        with pytest.raises(RequestError, match="routing.json: "):
            open_profile(name, class_name, path, lambda: SHAPE)


def test_a_lock_that_is_never_given_up_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profilefile, "_LOCK_SECONDS", 0.2)
    path = saved(tmp_path / "p.json", "default")
    opened = ProfileFile(path, "", False, SHAPE)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(opened.update, COUNTS).result(timeout=120)
        assert f"another process has locked the folder {tmp_path} for 0.2 s" in kept.warning
        assert read_profile(path, SHAPE).classes["default"].n_tokens == 5
        os.close(descriptor)
        assert pool.submit(opened.update, COUNTS).result(timeout=120).warning == ""
    assert read_profile(path, SHAPE).classes["default"].n_tokens == 10


def test_what_is_read_is_what_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is turned meanwhile cannot have another file replaced."""
    mine, victim, link = saved(tmp_path / "mine", "a"), tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(mine)
    opened = ProfileFile(link, "a", False, SHAPE)
    link.unlink()
    link.symlink_to(victim)
    resolve = Path.resolve

    def turn(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path == link:
            link.unlink()
            link.symlink_to(mine)
        return found

    monkeypatch.setattr(Path, "resolve", turn)
    assert "not a routing profile" in opened.update(COUNTS).warning
    assert victim.read_text() == "precious"


def test_runs_that_end_together_all_count(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", "default")

    def runs(_: int) -> None:
        for _ in range(10):
            assert ProfileFile(path, "", False, SHAPE).update(COUNTS).warning == ""

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(runs, range(4)))
    assert read_profile(path, SHAPE).classes["default"].n_tokens == 5 + 4 * 10 * 5
    assert os.listdir(tmp_path) == ["p.json"]


def test_only_choices_since_the_last_call_are_added(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    opened = ProfileFile(path, "", True, SHAPE)
    assert opened.update(COUNTS).n_tokens == 5
    assert opened.update(COUNTS).why == "the run computed no token"
    path.chmod(0o400)
    refused = opened.update(2 * COUNTS)
    path.chmod(0o600)
    assert refused.why or os.geteuid() == 0
    assert opened.update(3 * COUNTS).n_tokens == (10 if refused.why else 5)
    assert read_profile(path, SHAPE).classes["default"].n_tokens == 15
