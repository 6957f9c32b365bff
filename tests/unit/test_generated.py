"""Stop strings, UTF-8 pieces and the life of a sequence."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import ContextOverflow, RequestError
from moegraph.loop.generated import GeneratedText
from moegraph.text.stream import MAX_STOP_CHARS, MAX_STOPS, StopMatcher


def split(data, cuts: list[int]):
    """Cut data at the given places, empty pieces included."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=8))
def test_pieces_give_the_text_of_the_whole(pieces: list[bytes]) -> None:
    """What is shown is never taken back, though characters come in parts or are none."""
    sequence = GeneratedText([0], n_ctx=99, max_tokens=len(pieces), piece=pieces.__getitem__)
    whole, shown = b"".join(pieces).decode(errors="replace"), ""
    for token in range(len(pieces)):
        sequence.append(token)
        shown += sequence.tell()
        assert whole.startswith(shown)
    assert shown == whole == sequence.text


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one character after the other until a stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


FEW_LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


class TestStopMatcher:
    @given(FEW_LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=8))
    def test_the_split_of_the_text_makes_no_difference(
        self, text: str, stops: list[str], cuts: list[int]
    ) -> None:
        matcher = StopMatcher(stops)
        shown = "".join(matcher.push(piece) for piece in split(text, cuts)) + matcher.flush()
        assert (shown, matcher.matched) == first_stop(text, stops)

    @given(FEW_LETTERS, STOPS)
    def test_no_more_is_held_back_than_a_stop_string_could_need(
        self, text: str, stops: list[str]
    ) -> None:
        matcher = StopMatcher(stops)
        shown = ""
        for at, char in enumerate(text):
            shown += matcher.push(char)
            if matcher.matched is not None:
                return
            held = text[len(shown) : at + 1]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)

    @pytest.mark.parametrize(
        ("stops", "line"),
        [
            ([""], "a stop string is empty"),
            (["x"] * (MAX_STOPS + 1), f"at most {MAX_STOPS}"),
            (["x" * (MAX_STOP_CHARS + 1)], f"at most {MAX_STOP_CHARS}"),
            ([3], r"stop is \[3\]; allowed: a string, or a list of strings"),
            (["x", b"y"], "a list of strings"),
            (3, "stop is 3;"),
            (None, "stop is None;"),
        ],
    )
    def test_useless_stop_strings_are_refused(self, stops: Any, line: str) -> None:
        with pytest.raises(RequestError, match=line):
            StopMatcher(stops)


def byte_of(token: int) -> bytes:
    return bytes([token])


def take(seq: GeneratedText, token: int) -> str:
    """Append a token; return the text that it completes."""
    seq.append(token)
    return seq.tell()


class TestSequence:
    def test_the_context_bounds_max_tokens(self) -> None:
        seq = GeneratedText([0] * 6, n_ctx=8, max_tokens=100)
        while seq.finish_reason is None:
            take(seq, 7)
        assert seq.n_generated == 3

    def test_after_a_shift_the_context_has_room_for_the_rest(self) -> None:
        seq = GeneratedText([0] * 6, n_ctx=8, max_tokens=5, shifts=True)
        full = []
        while seq.finish_reason is None:
            take(seq, 7)
            full.append((seq.is_full, seq.n_left, seq.n_room))
            if seq.is_full:
                seq.shift(4)
        assert full == [(False, 2, 2), (False, 1, 1), (True, 0, 0), (False, 1, 3), (False, 0, 2)]

    def test_an_end_token_counts_and_has_no_text(self) -> None:
        seq = GeneratedText([1], n_ctx=16, piece=byte_of, eog_ids={0})
        take(seq, 104)
        assert take(seq, 0) == ""
        assert (seq.finish_reason, seq.tokens, seq.text) == ("stop", [104, 0], "h")

    @pytest.mark.parametrize("how", ["length", "eog", "cancel"])
    def test_held_text_appears_at_the_end(self, how: str) -> None:
        seq = GeneratedText(
            [1], n_ctx=64, max_tokens=2 if how == "length" else None,
            piece=byte_of, stop=["END"], eog_ids={0},
        )  # fmt: skip
        take(seq, ord("E"))
        if how == "length":
            assert take(seq, ord("N")) == "EN"
        else:
            take(seq, ord("N"))
            assert (take(seq, 0) if how == "eog" else seq.cancel()) == "EN"
        assert seq.text == "EN"

    def test_without_a_vocabulary_there_are_ids_and_no_text(self) -> None:
        seq = GeneratedText([1], n_ctx=64, max_tokens=1)
        assert (take(seq, 5), seq.tokens) == ("", [5])
        with pytest.raises(RequestError, match="vocabulary"):
            GeneratedText([1], n_ctx=64, stop=["x"])

    def test_an_impossible_prompt_is_refused(self) -> None:
        with pytest.raises(RequestError, match="prompt is empty"):
            GeneratedText([], n_ctx=4)
        with pytest.raises(ContextOverflow, match="5 tokens, the context holds 4"):
            GeneratedText([1] * 5, n_ctx=4)
        for wrong in (-1, 2.5, 2.0, "2", float("nan"), np.float32(2)):
            line = f"max_tokens is {wrong!r}; allowed: an integer, 0 or more"
            with pytest.raises(RequestError, match=re.escape(line)):
                GeneratedText([1], n_ctx=4, max_tokens=cast(int, wrong))
        assert GeneratedText([1], n_ctx=4, max_tokens=cast(int, np.int64(2))).n_left == 2


def test_tokens_that_come_together_are_told_one_by_one() -> None:
    """The last of them may end the text; what is held back before belongs to it."""
    halves = {1: b"\xc3", 2: b"\xa4", 3: b"x", 4: b"en", 5: b"d"}
    for stop, told, reason in ((), ["", "ä", "x"], "length"), (("end",), ["", "ä", "x"], "length"):
        sequence = GeneratedText([9], n_ctx=99, max_tokens=3, piece=lambda t: halves[t], stop=stop)
        for token in (1, 2, 3):
            sequence.append(token)
        assert (sequence.finish_reason, sequence.n_left) == (reason, 0)
        assert [sequence.tell() for _ in range(3)] == told
        assert sequence.text == "äx"
    sequence = GeneratedText([9], n_ctx=99, piece=lambda t: halves[t], stop=("end",))
    assert sequence.n_left == sequence.n_room == 99
    for token in (3, 4):
        sequence.append(token)
    assert sequence.finish_reason is None and sequence.n_left == sequence.n_room == 97
    sequence.append(5)
    assert sequence.finish_reason == "stop" and sequence.n_left == 0
    assert [sequence.tell() for _ in range(3)] == ["x", "", ""] and sequence.text == "x"
