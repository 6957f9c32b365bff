"""Tests of keys, hosts, bodies and logs: who is let in, and with what."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.patience import until
from helpers.server_case import CHAT, Case

from moegraph.errors import ConfigError, NativeError
from moegraph.server.guards import Guard, Keys, read_keys
from moegraph.server.logs import RequestLog, start_logging
from moegraph.server.schemas import Limits

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"X-Api-Key": "wrong"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"X-Api-Key": "two"}, 200),
    ],
)
def test_only_clients_with_a_key_are_served(headers: dict[str, str], status: int) -> None:
    case = Case(guard=Guard(Keys(["one", "two"]), hosts=None))
    response = case.post(PATH, CHAT, headers=headers)
    assert response.status_code == status
    assert ("www-authenticate" in response.headers) == (status == 401)
    assert case.client.get("/health").status_code == 200
    assert case.client.get("/slots", headers=headers).status_code == status


def test_other_keys_count_from_then_on() -> None:
    keys = Keys(["old"])
    case = Case(guard=Guard(keys, hosts=None))
    keys.replace(["new"])
    assert case.client.get("/props", headers={"X-Api-Key": "old"}).status_code == 401
    assert case.client.get("/props", headers={"X-Api-Key": "new"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "any_address", "status"),
    [
        ("localhost:8080", False, 200),
        ("127.0.0.1", False, 200),
        ("[::1]:80", False, 200),
        ("LOCALHOST.", False, 200),
        ("evil.example", False, 403),
        ("evil.example", True, 403),
        ("127.0.0.1.evil.example", True, 403),
        ("10.1.2.3", False, 403),
        ("10.1.2.3:80", True, 200),
        ("", False, 403),
    ],
)
def test_only_hosts_that_are_ours_are_served(host: str, any_address: bool, status: int) -> None:
    case = Case(guard=Guard(Keys(), any_address=any_address))
    response = case.client.get("/health", headers={"Host": host})
    assert response.status_code == status


@pytest.mark.parametrize(
    "host",
    [
        "localhost:80@evil", "evil@localhost", "localhost:80:90", "localhost:x", "localhost/",
        "a b", "localhost,evil", "[::1", "[::1]x", "[::1]:80@evil", "http://localhost", "\xe4",
    ],
)  # fmt: skip
@pytest.mark.parametrize("hosts", [None, frozenset({"localhost", "::1"})])
def test_a_host_that_is_no_name_is_refused_and_the_connection_closed(
    host: str, hosts: frozenset[str] | None
) -> None:
    case = Case(guard=Guard(Keys(), hosts=hosts))
    response = case.client.get("/health", headers={"Host": host.encode("latin-1")})
    assert response.status_code == 400 and response.headers["connection"] == "close"
    assert "Host" in response.json()["error"]["message"]


PATHS = (
    PATH, "/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template",
    "/completion", "/nowhere",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
@pytest.mark.parametrize("path", PATHS)
def test_a_post_must_be_json_and_is_told_how(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = Case().client.post(path, content=json.dumps(CHAT), headers=headers)
    said = response.json()["error"]["message"]
    assert response.status_code == 415 and "-H 'Content-Type: application/json'" in said


def curl_calls() -> list[list[str]]:
    """Return the words of all calls of curl that the pages show."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found: list[list[str]] = []
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        found += [shlex.split(line) for line in text.splitlines() if line.startswith("curl ")]
    return found


def test_what_the_pages_tell_curl_is_answered() -> None:
    calls = curl_calls()
    assert calls
    for words in calls:
        options = list(zip(words, words[1:]))
        (url,) = (word for word in words if word.startswith("http://127.0.0.1:8080"))
        headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
        body = next(value for name, value in options if name == "-d")
        # as curl sends it, if no -H says otherwise
        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        path = url.removeprefix("http://127.0.0.1:8080")
        response = Case().client.post(path, content=body, headers=headers)
        assert response.status_code == 200, f"{shlex.join(words)}: {response.text}"


def test_a_compressed_body_is_refused_as_such() -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = Case().client.post(PATH, content=gzip.compress(b"{}"), headers=headers)
    assert response.status_code == 415 and "compressed" in response.json()["error"]["message"]


def test_pages_of_other_origins_are_refused_unless_named() -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert Case().client.options(PATH, headers=ask).status_code == 405
    case = Case(guard=Guard(Keys(["k"]), hosts=None, origins=("https://a.example",)))
    response = case.client.options(PATH, headers=ask)
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert "DELETE" in response.headers["access-control-allow-methods"]  # of stored responses
    other = case.client.options(PATH, headers={**ask, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    answer = case.client.get("/props", headers={"Origin": "https://a.example", "X-Api-Key": "k"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b'{"messages": NaN}', b'{"a": "\xff"}',
        b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b"{'a': 1}", b"\x00",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = Case().client.post(PATH, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_json"


def test_a_large_body_is_refused_while_it_comes() -> None:
    case = Case(state={"limits": Limits(body_bytes=1000)})
    headers = {"Content-Type": "application/json"}
    given: tuple[Any, ...] = (b"x" * 1001, iter([b"x" * 600] * 2))
    for content in given:
        response = case.client.post(PATH, content=content, headers=headers)
        assert response.status_code == 413, response.text
    response = case.client.post(PATH, content=b"{}", headers={**headers, "Content-Length": "2000"})
    assert response.status_code == 413, "it need not arrive"


def test_an_error_repeats_little_of_what_a_client_sent() -> None:
    error = Case().post(PATH, {**CHAT, "temperature": "x" * 1000}).json()["error"]
    assert error["param"] == "temperature" and len(error["message"]) < 200


def test_bodies_have_a_limit_together() -> None:
    case = Case(["a"], hold=threading.Event(), state={"limits": Limits(held_bytes=3000)})
    body = {"prompt": "x" * 1000}
    found: list[Any] = []
    asking = [
        threading.Thread(target=lambda: found.append(case.post("/v1/completions", body)))
        for _ in range(2)
    ]
    for one in asking:
        one.start()
    until(lambda: len(case.service.tickets) == 2)
    refused = case.post("/v1/completions", body)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_large_together"
    assert case.service.hold is not None
    case.service.hold.set()
    for one in asking:
        one.join()
    assert [response.status_code for response in found] == [200, 200]
    assert case.post("/v1/completions", body).status_code == 200


def test_a_body_of_very_many_values_is_refused_before_they_are_made() -> None:
    case = Case()
    headers = {"Content-Type": "application/json"}
    body = b'{"x": [' + b"[]," * 1_200_000 + b'[]], "messages": [{"role": "user", "content": "a"}]}'
    response = case.client.post(PATH, content=body, headers=headers)
    assert response.status_code == 413 and "values" in response.text
    texts = {"messages": [{"role": "user", "content": "a, " * 300_000}]}
    assert "context" in case.post(PATH, texts).text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", PATH, 405), ("GET", "/x", 404)])
def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    response = Case().client.request(method, path)
    assert response.status_code == status and response.json()["error"]["message"]
    assert ("allow" in response.headers) == (status == 405)


def test_each_request_has_an_id() -> None:
    case = Case()
    response = case.post(PATH, CHAT, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "chatcmpl-abc-1" and case.service.requests[0].name == "abc-1"
    forged = case.post(PATH, CHAT, headers={"X-Request-Id": "a b\tc"})
    assert forged.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_log_has_figures_and_no_prompt(format: str) -> None:
    stream = io.StringIO()
    start_logging(format, stream)
    try:
        case = Case(["answer-text"])
        case.chat(messages=[{"role": "user", "content": "prompt-text"}], model="a\nb")
        case.events(PATH, CHAT)
        case.answer("/completion", {"prompt": "prompt-text"})
        case.client.get("/x%0a%1b[31my")
    finally:
        start_logging("off", stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and stream.getvalue().isascii()
    assert "prompt-text" not in stream.getvalue() and "answer-text" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    if format == "json":
        found = json.loads(lines[0])
        assert found["n_generated"] == 11 and found["status"] == 200
        assert [json.loads(line).get("finish") for line in lines] == ["stop"] * 3 + [None]
    else:
        assert "n_generated=11" in lines[0] and "status=200" in lines[1]


def test_a_request_that_is_cut_off_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    async def go() -> None:
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
        app: Any = RequestLog(hang)
        running = asyncio.ensure_future(app(scope, hang, hang))
        await asyncio.sleep(0)
        running.cancel()
        await running

    logging.getLogger("moegraph").propagate = True
    caplog.set_level(logging.INFO, "moegraph")
    asyncio.run(go())
    assert vars(caplog.records[-1])["finish"] == "cut off" and not caplog.records[-1].exc_info


def test_a_failure_of_ours_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("moegraph").propagate = True
    response = Case(refusal=KeyError("inner")).post(PATH, CHAT)
    assert response.status_code == 500 and "inner" not in response.text
    assert "inner" in caplog.text and "Traceback" in caplog.text
    caplog.clear()
    assert Case(refusal=NativeError("no memory")).post(PATH, CHAT).status_code == 500
    assert "no memory" in caplog.text and "Traceback" not in caplog.text


def test_keys_of_the_command_line_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    assert read_keys(("a,b", "c"), file, "d") == ["a", "b", "c", "one", "two"]
    assert read_keys((), None, "d, e") == ["d", "e"]
    assert read_keys((), None, None) == []


@pytest.mark.parametrize("text", ["", "# none\n", "a b\n", "a\tb\n", "a\x7f\n", "é\n"])
def test_wrong_keys_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_keys((), file, None)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys((), tmp_path / "absent", None)
    with pytest.raises(ConfigError, match="empty"):
        read_keys(("",), None, None)
