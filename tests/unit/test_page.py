"""Tests of the page at /: how it is served, and that its files need nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.server_case import Case

from moegraph.server import info
from moegraph.server.guards import Guard, Keys
from moegraph.server.info import FILES

# lib has other people's files, if the build could fetch them
NAMES = sorted(path.name for path in FILES.iterdir() if path.is_file())
TEXTS = {name: (FILES / name).read_text(encoding="utf-8") for name in NAMES}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml",
         "webmanifest": "application/manifest+json"}  # fmt: skip
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
    assert rules.pop("img-src") == "'self' data:"
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
    own = {one for one in page if not one.startswith("lib/")}
    assert {*own, *imported, "index.html"} == set(NAMES)
    pin = json.loads((FILES.parents[2] / "vendor" / "page.json").read_text("utf-8"))
    assert {*page} - own == {f"lib/{one}" for one in pin["files"].split()}


def test_libraries_are_served_if_the_build_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("index.html", "lib/a.js", "lib/fonts/b.woff2", "lib/LICENSES.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(info, "FILES", tmp_path)
    table = info._page()
    assert {*table.public} == {"/", "/page/lib/a.js", "/page/lib/fonts/b.woff2"}
