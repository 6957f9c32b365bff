"""Routing profiles: kept by class, forgetting, refused when damaged or of another model."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.errors import ConfigError, RequestError
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile, read_profile

SHAPE = RouterShape(2, 4, 2, "abc")
CODE = [[8, 0, 1, 1], [0, 5, 5, 0]]
PROSE = [[0, 6, 2, 2], [1, 1, 1, 7]]


def two_classes() -> Profile:
    profile = Profile(SHAPE)
    profile.add("code", CODE, 5)
    profile.add("prose", PROSE, 5)
    return profile


def test_classes_come_back_from_the_file(tmp_path: Path) -> None:
    two_classes().save(tmp_path / "p.json")
    back = read_profile(tmp_path / "p.json", SHAPE)
    assert list(back.classes) == ["code", "prose"]
    assert back.classes["code"].n_tokens == 5
    assert back.classes["prose"].counts.tolist() == PROSE
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_shares_add_up_to_the_experts_a_token_uses() -> None:
    profile = two_classes()
    assert profile.shares("code").tolist() == [[1.6, 0, 0.2, 0.2], [0, 1, 1, 0]]
    assert profile.shares().sum(axis=1) == pytest.approx([2, 2])
    assert profile.shares()[0].tolist() == pytest.approx([0.8, 0.6, 0.3, 0.3])
    assert Profile(SHAPE).shares().tolist() == [[0.0] * 4] * 2


def test_demand_is_the_mean_of_classes_that_prefer_different_experts() -> None:
    assert two_classes().demand()[0].tolist() == pytest.approx([1.4, 0.3, 0.3, 0.0])


def test_experts_chosen_equally_often_are_ranked_by_id() -> None:
    profile, counts = Profile(RouterShape(1, 256, 8)), np.arange(256) // 7 % 3
    profile.add("a", [counts], 9)
    wanted = sorted(range(256), key=lambda expert: (-counts[expert], expert))
    assert profile.ranking()[0].tolist() == wanted


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "\n", "ä"])
def test_unusable_class_names_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="use 1 to 64 letters"):
        Profile(SHAPE).add(name, CODE, 5)


def test_an_unknown_class_is_named_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="no class 'poems'; it has: code, prose"):
        two_classes().shares("poems")
    with pytest.raises(RequestError, match="it has: none yet"):
        Profile(SHAPE).ranking("poems")


@pytest.mark.parametrize(
    ("model", "say"),
    [(RouterShape(2, 8, 2, "abc"), "is of a model with 2 layers of 4 experts, 2 used; this model"),
     (RouterShape(2, 4, 2, "xyz"), "another router .abc; this model: xyz.")],
)  # fmt: skip
def test_profile_of_another_model_is_refused(tmp_path: Path, model: RouterShape, say: str) -> None:
    two_classes().save(tmp_path / "p.json")
    with pytest.raises(RequestError, match=say):
        read_profile(tmp_path / "p.json", model)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *way, last = path.split("/")
        for key in way:
            content = content[key]
        content[last] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "say"),
    [
        (change("format", "x"), "not a routing profile"),
        (change("version", 9), "profile version 9; this moegraph reads 1"),
        (change("n_layer", 0), "does not describe a router"),
        (change("n_expert", 1e9), "does not describe a router"),
        (change("classes", []), "no object of at most 64 classes"),
        (change("classes", {str(i): 0 for i in range(65)}), "at most 64 classes"),
        (change("classes/code", 5), "class 'code' has a bad name, or is not an object"),
        (change("classes/a b", {}), "class 'a b' has a bad name, or is not an object"),
        (change("classes/code/n_tokens", -1), "n_tokens -1"),
        (change("classes/code/counts", [[1, 2]]), "has no counts of 2 x 4"),
        (change("classes/code/counts", [[1, 2, 3, 4], [1, 2, 3]]), "has no counts of 2 x 4"),
        (change("classes/code/counts", [[1, 2, 3, 4], [1, 2, 3, -4]]), "has no counts of 2 x 4"),
        (change("classes/code/counts", [[1, 2, 3, 4], [1, 2, 3, True]]), "has no counts of 2 x 4"),
        (change("classes/code/counts", [[1, 2, 3, 4], [1, 2, 3, 2.5]]), "has no counts of 2 x 4"),
        (
            change("classes/code/counts", [[1, 2, 3, 4], [1, 2, 3, 1 << 70]]),
            "has no counts of 2 x 4",
        ),
    ],
)
def test_damaged_profiles_are_refused_in_one_line(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], say: str
) -> None:
    path = tmp_path / "p.json"
    two_classes().save(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError) as caught:
        read_profile(path, SHAPE)
    assert say in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 60_000, b"[1]", b"{}", b"nan"])
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(RequestError, match="not a routing profile"):
        read_profile(tmp_path / "p.json", SHAPE)


BIG = RouterShape(40, 256, 8, "abc")


@pytest.mark.parametrize("unit", [b"{},", b"[],", b"[[", b'{"a":', b"1,", b"[1000,-1000],", b'"",'])
def test_reading_takes_little_memory_whatever_is_in_the_file(tmp_path: Path, unit: bytes) -> None:
    path = tmp_path / "p.json"
    for n_bytes in (10_400_000, 600_000 * len(unit)):
        path.write_bytes(b"[" + unit * (min(n_bytes, 10_400_000) // len(unit)) + b"0]")
        tracemalloc.start()
        with pytest.raises(RequestError, match="not a routing profile"):
            read_profile(path, BIG)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 80 << 20


def test_files_out_of_reach_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read the profile: No such file"):
        read_profile(tmp_path / "p.json", SHAPE)
    with pytest.raises(ConfigError, match="cannot write"):
        two_classes().save(tmp_path)
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(RequestError, match="profile of 300 MiB; one of this model has at most"):
        read_profile(huge, SHAPE)


def test_old_choices_count_less_and_classes_are_few() -> None:
    profile = Profile(RouterShape(1, 2, 1))
    profile.add("a", [[1 << 16, 0]], 1 << 16)
    profile.add("a", [[0, 1 << 15]], 1 << 15)
    assert profile.shares("a").tolist() == [[0.5, 0.5]]
    profile.add("a", [[0, 3 << 15]], 3 << 15)  # more than all before
    assert profile.shares("a").tolist() == [[0.2, 0.8]]
    for i in range(63):
        profile.add(f"{i}", [[1, 0]], 1)
    with pytest.raises(RequestError, match="a profile holds 64 classes"):
        profile.add("b", [[1, 0]], 1)
