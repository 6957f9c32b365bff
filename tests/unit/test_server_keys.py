"""Tests of keys: every route asks for one, and what one key has made is no other's."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.server_case import Case
from starlette.routing import Route

from moegraph.loop.requests import SlotStatus
from moegraph.server.guards import Guard, Keys
from moegraph.server.responsestore import ResponseStore

ONE, TWO = "sk-moegraph-0001", "sk-moegraph-0002"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
# What a browser and a load balancer ask for before there is a key, and nothing else.
PUBLIC = {"/", "/health", "/v1/health"}
WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "the beginning": {"Authorization": f"Bearer {ONE[:-1]}"},
    "the same beginning": {"Authorization": f"Bearer {ONE[:-1]}9"},
    "longer": {"Authorization": f"Bearer {ONE}1"},
    "another case": {"X-Api-Key": ONE.upper()},
    "two in one": {"X-Api-Key": f"{ONE},{TWO}"},
    "empty": {"Authorization": "Bearer ", "X-Api-Key": ""},
    "a right one that does not count": {"Authorization": "Bearer wrong", "X-Api-Key": ONE},
}


def case_of(*scripts: Any, **given: Any) -> Case:
    return Case(*scripts, guard=Guard(Keys([ONE, TWO]), hosts=None), **given)


def paths(case: Case) -> list[str]:
    """Return a path of every route of the server."""
    found = [route.path for route in case.app.routes if isinstance(route, Route)]
    assert len(found) == len(case.app.routes) > 30
    return [path.replace("{name:path}", "any").replace("{id}", "resp_1") for path in found]


def is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith("/page/")


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_no_route_and_no_method_answers_without_a_right_key(headers: dict[str, str]) -> None:
    case = case_of()
    for path in [*paths(case), "/nowhere", "/metrics/", "/%6detrics"]:
        for method in METHODS if headers in ({}, WRONG["longer"]) else ("POST",):
            response = case.client.request(method, path, json={}, headers=headers)
            if is_public(path):
                assert response.status_code in (200, 405, 415), f"{method} {path}"
            else:
                assert response.status_code == 401, f"{method} {path}"
                assert method == "HEAD" or response.json()["error"], f"{method} {path}"
    assert not case.service.requests


@pytest.mark.parametrize("key", [ONE, TWO])
def test_every_route_lets_each_key_in(key: str) -> None:
    case = case_of()
    for path in paths(case):
        for method in METHODS:
            response = case.client.request(method, path, json={}, headers={"X-Api-Key": key})
            assert response.status_code not in (401, 403), f"{method} {path}"


def ask(case: Case, key: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return case.post("/v1/responses", {"model": "m", **body}, headers=headers)


def test_a_response_belongs_to_the_key_that_made_it() -> None:
    case = case_of(["one"], ["two"])
    secret = [{"id": "msg_in", "type": "message", "role": "user", "content": "secret"}]
    first = ask(case, ONE, input=secret).json()
    at, no = f"/v1/responses/{first['id']}", "/v1/responses/resp_none"
    for method in METHODS:
        got, none = (
            case.client.request(method, path, json={}, headers={"X-Api-Key": TWO})
            for path in (at, no)
        )
        assert got.status_code == none.status_code != 200, method
        assert got.text.replace(first["id"], "resp_none") == none.text, method
    continued = ask(case, TWO, input="go on", previous_response_id=first["id"])
    missing = ask(case, TWO, input="go on", previous_response_id="resp_none")
    assert continued.status_code == missing.status_code == 400
    assert continued.text.replace(first["id"], "resp_none") == missing.text
    for item in ("msg_in", first["output"][0]["id"]):
        found = ask(case, TWO, input=[{"type": "item_reference", "id": item}])
        assert found.status_code == 400 and "there is no item" in found.text
    assert len(case.service.requests) == 1
    assert case.client.get(at, headers={"X-Api-Key": ONE}).json()["id"] == first["id"]
    assert ask(case, ONE, input="go on", previous_response_id=first["id"]).status_code == 200
    gone = case.client.delete(at, headers={"X-Api-Key": ONE})
    assert gone.status_code == 200


def test_the_ids_that_one_key_gives_items_do_not_hide_those_of_another() -> None:
    case = case_of(["one"])
    for key, text in ((ONE, "mine"), (TWO, "yours")):
        ask(case, key, input=[{"id": "i", "type": "message", "role": "user", "content": text}])
    assert ask(case, ONE, input=[{"type": "item_reference", "id": "i"}]).status_code == 200
    assert case.model.chats[-1].messages[-1]["content"] == "mine"


def test_responses_outlive_a_change_of_other_keys() -> None:
    keys = Keys([ONE, TWO])
    case = Case(["one"], guard=Guard(keys, hosts=None))
    made = ask(case, ONE, input="a").json()
    keys.replace(["sk-moegraph-0003", ONE])
    found = case.client.get(f"/v1/responses/{made['id']}", headers={"X-Api-Key": ONE})
    assert found.status_code == 200


def test_one_client_cannot_push_out_what_another_keeps() -> None:
    def response(name: str) -> dict[str, Any]:
        return {"id": name, "output": [], "text": "y" * 100}

    stores = ResponseStore(cap_bytes=1000)
    stores.put("a", response("mine"), [])
    for at in range(50):
        stores.put("b", response(f"x{at}"), [])
    assert stores.response("a", "mine") and stores.response("b", "x49")
    assert 1 < len(stores) < 10 and stores.n_bytes <= 1000


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"model": "m", "input": "a"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("path", ASKED)
def test_each_key_has_a_cache_of_its_own_if_asked(path: str) -> None:
    def owners(key: str, **state: Any) -> set[str]:
        case = case_of(state=state)
        assert case.post(path, ASKED[path], headers={"X-Api-Key": key}).status_code == 200
        return {request.owner for request in case.service.requests}

    assert owners(ONE) == owners(TWO) == {""}
    [one], [two] = owners(ONE, cache_by_key=True), owners(TWO, cache_by_key=True)
    # another process with the same key finds what this one has written
    assert owners(ONE, cache_by_key=True) == {one} != {two}
    for made in (one, two):
        assert len(made) == 32  # as in files, which have neither the key nor a fast hash of it
        assert ONE not in made and Keys([ONE]).owner(ONE.encode())[:32] != made


def test_of_another_keys_request_slots_tell_only_counts() -> None:
    case = case_of()
    headers = {"X-Api-Key": ONE, "X-Request-Id": "of-one"}
    body = {**ASKED["/v1/chat/completions"], "n": 1, "seed": 4711, "max_tokens": 7}
    assert case.post("/v1/chat/completions", body, headers=headers).status_code == 200
    (asked,) = case.service.requests
    case.service.slots = (SlotStatus(0, "answering", 9, 5, 4, 3, 2, request=asked),)
    ([own], [other]) = (
        case.client.get("/slots", headers={"X-Api-Key": key}).json() for key in (ONE, TWO)
    )
    assert own["request"] == "of-one" and own["params"]["seed"] == 4711
    assert other == {name: own[name] for name in own if name not in ("request", "params")}
    assert other["n_prompt_tokens"] == 5 and "4711" not in str(other)
