"""Tests of the page at /: how it is served, and that its files need nothing from elsewhere."""

from __future__ import annotations

import re

import pytest
from helpers.server_case import Case

from moegraph.server.guards import Guard, Keys
from moegraph.server.info import FILES

NAMES = sorted(path.name for path in FILES.iterdir())
TEXTS = {name: (FILES / name).read_text(encoding="utf-8") for name in NAMES}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Ways by which a script makes HTML or code of text, or shows another page.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|createContextualFragment|document\.write|\beval\b"
    r"|new Function|DOMParser|srcdoc|location"
)


def url(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_served_without_a_key_under_a_strict_policy(name: str) -> None:
    case = Case(guard=Guard(Keys(["secret"]), hosts=None))
    response = case.client.get(url(name))
    assert response.status_code == 200 and response.content == (FILES / name).read_bytes()
    headers = response.headers
    assert headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert rules.pop("default-src") == rules.pop("frame-ancestors") == "'none'"
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'self'", "'none'"} and rules["script-src"] == "'self'"
    assert case.client.head(url(name)).headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize(
    "path", ["/page/", "/page", "/page/index.html", "/page/../info.py", "/page/%2e%2e/site.py",
             "/page//etc/passwd", "/favicon.ico"],
)  # fmt: skip
def test_nothing_else_is_served(path: str) -> None:
    assert Case().client.get(path).status_code == 404


def test_the_page_is_for_its_own_hosts_and_takes_no_post() -> None:
    case = Case(guard=Guard(Keys()))
    assert case.client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert case.client.get("/", headers={"Host": "localhost:1"}).status_code == 200
    assert case.client.post("/", json={}, headers={"Host": "localhost"}).status_code == 405


@pytest.mark.parametrize("name", NAMES)
def test_files_name_no_other_address(name: str) -> None:
    found = re.findall(r"(?:\w+:)?//[\w.]+\S*|@import|url\(", without_comments(TEXTS[name]))
    assert [one for one in found if not one.startswith("http://www.w3.org/2000/svg")] == []


def without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|[\s;{}(])// .*$", r"\1", text)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".js", ".html"))])
def test_scripts_make_no_html_of_text(name: str) -> None:
    assert UNSAFE.findall(TEXTS[name]) == []
    assert re.findall(r"\son\w+=|style=|<script>|javascript:", TEXTS[name]) == []


def test_files_that_are_named_exist() -> None:
    page = re.findall(r'(?:href|src)="page/([^"]+)"', TEXTS["index.html"])
    imported = [
        one for name in NAMES for one in re.findall(r'from "\./([^"]+)"', TEXTS[name])
    ]  # fmt: skip
    assert {*page, *imported, "index.html"} == set(NAMES)
