"""The store of responses that later requests refer to."""

from __future__ import annotations

from typing import Any

import pytest

from moegraph.server.errors import ApiError
from moegraph.server.responsestore import ResponseStore


def response(name: str, previous: str | None = None, text: str = "") -> dict[str, Any]:
    output = [{"id": f"msg_{name}", "type": "message", "content": text}]
    return {"id": name, "output": output, "previous_response_id": previous}


def question(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}]


def test_a_conversation_is_the_chain_of_its_responses() -> None:
    store = ResponseStore()
    store.put("", response("a"), question("1"))
    store.put("", response("b", "a"), question("2"))
    store.put("", response("c", "a"), question("3"))
    ids = [item.get("id", item["content"]) for item in store.items("", "b")]
    assert ids == ["1", "msg_a", "2", "msg_b"]
    assert store.items("", "c")[2:] == [*question("3"), response("c")["output"][0]]


def test_a_response_is_found_and_deleted_by_its_id() -> None:
    store = ResponseStore()
    store.put("", response("a"), question("1"))
    assert (
        store.response("", "a") == response("a")
        and store.item("", "msg_a") == response("a")["output"][0]
    )
    store.delete("", "a")
    assert (len(store), store.n_bytes, store.item("", "msg_a")) == (0, 0, None)
    for look in (store.response, store.delete):
        with pytest.raises(ApiError, match="there is no response 'a'") as caught:
            look("", "a")
        assert caught.value.status == 404


def test_a_broken_chain_is_refused() -> None:
    store = ResponseStore()
    store.put("", response("a"), question("1"))
    store.put("", response("b", "a"), question("2"))
    store.delete("", "a")
    with pytest.raises(ApiError, match="send the whole input") as caught:
        store.items("", "b")
    assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


def test_the_cap_in_bytes_holds_and_what_was_used_stays() -> None:
    one = ResponseStore()
    one.put("", response("x0", text="y" * 100), question("z"))
    size = one.n_bytes
    store = ResponseStore(cap_bytes=3 * size)
    for at in range(3):
        store.put("", response(f"x{at}", text="y" * 100), question("z"))
    store.items("", "x0")
    store.put("", response("x3", text="y" * 100), question("z"))
    assert store.n_bytes <= 3 * size and len(store) == 3
    assert store.response("", "x0") and store.response("", "x3")
    with pytest.raises(ApiError):
        store.response("", "x1")


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    one = ResponseStore()
    one.put("", response("x0", text="y" * 100), question("z"))
    store = ResponseStore(cap_bytes=3 * one.n_bytes + 20)
    store.put("", response("x0", text="y" * 100), question("z"))
    store.put("", response("x1", "x0", text="y" * 100), question("z"))
    store.items("", "x1")
    store.put("", response("x2", text="y" * 100), question("z"))
    store.put("", response("x3", text="y" * 100), question("z"))
    assert store.items("", "x0")
    with pytest.raises(ApiError):
        store.response("", "x1")


def test_what_is_larger_than_the_cap_is_not_kept_and_pushes_nothing_out() -> None:
    store = ResponseStore(cap_bytes=150)
    store.put("", response("a"), [])
    store.put("", response("b", text="y" * 150), [])
    assert len(store) == 1 and store.response("", "a") == response("a")
