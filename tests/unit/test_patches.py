"""Patches and native files: they fit the pinned source exactly, and their READMEs are true."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
README = (ROOT / "patches" / "README.md").read_text("utf-8")
NATIVE_README = (ROOT / "native" / "README.md").read_text("utf-8")
NATIVE_ROW = re.compile(r"^\| (`(?:include|src)/.*?) \|(.*)\|$", re.MULTILINE)
ROW = re.compile(r"^\| (\d{4}-[a-z0-9-]+) \|(.*)\|$", re.MULTILINE)

DIFF = """\
Say why.

---
 a.txt | 2 +-

diff --git a/a.txt b/a.txt
--- a/a.txt
+++ b/a.txt
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""


@pytest.fixture(scope="module")
def sdist(fetch: ModuleType) -> Path:
    """Return a copy of the pinned source distribution, if one is at hand."""
    for place in (os.environ.get("MOEGRAPH_SDIST"), ROOT / "build" / "cache" / fetch.PIN["file"]):
        if place and Path(place).is_file():
            return Path(place)
    pytest.skip("no copy of the pinned source distribution here (scripts/build fetches one)")


@pytest.fixture(scope="module")
def pristine(fetch: ModuleType, sdist: Path) -> dict[str, str]:
    """Return path -> text of the upstream files that the patches touch."""
    touched = {
        line[len("+++ b/") :]
        for patch in PATCHES
        for line in patch.read_text("utf-8").splitlines()
        if line.startswith("+++ b/")
    }
    prefix = fetch.PIN["llama_cpp_path"] + "/"
    texts = {}
    with tarfile.open(sdist) as tar:
        for member in tar:
            name = member.name[len(prefix) :]
            if member.name.startswith(prefix) and name in touched:
                content = tar.extractfile(member)
                assert content is not None
                texts[name] = content.read().decode("utf-8")
    return texts


def test_the_series_applies_to_the_pinned_source(
    fetch: ModuleType, pristine: dict[str, str]
) -> None:
    series = [(patch.name, patch.read_text("utf-8")) for patch in PATCHES]
    texts = fetch.unified.apply_series(series, pristine.get)
    assert all(texts[path] != pristine.get(path) for path in texts)


def test_the_sdist_is_the_pinned_one(fetch: ModuleType, sdist: Path) -> None:
    assert fetch.verify(sdist) == sdist


def test_another_file_is_refused_by_its_hash(fetch: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / fetch.PIN["file"]
    other.write_bytes(b"not it")
    with pytest.raises(fetch.FetchError, match=r"sha256 is .*832db069"):
        fetch.verify(other)
    with pytest.raises(fetch.FetchError, match="no such file"):
        fetch.verify(tmp_path / "absent.tar.gz")


def test_the_rival_is_no_source_of_ours(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in the cache is taken by its hash; MOEGRAPH_SDIST names the pinned source alone."""
    monkeypatch.setenv("MOEGRAPH_SDIST", str(tmp_path / "absent.tar.gz"))
    monkeypatch.setattr(fetch, "sha256", lambda path: fetch.RIVAL["sha256"])
    copy = tmp_path / fetch.RIVAL["file"]
    copy.write_bytes(b"")
    assert fetch.find_sdist(None, tmp_path, fetch.RIVAL) == copy
    with pytest.raises(fetch.FetchError, match="no such file"):
        fetch.find_sdist(None, tmp_path)


def test_the_page_gets_its_libraries_alone(fetch: ModuleType, tmp_path: Path) -> None:
    folder = fetch.PAGE["folder"]
    names = [folder + one for one in (*fetch.PAGE["files"].split(), "fonts/a.woff2")]
    with zipfile.ZipFile(tmp_path / fetch.PAGE["file"], "w") as wheel:
        for name in (*names, f"{folder}fonts/a.woff", f"{folder}other.js", "fonts/a.woff2", "x.py"):
            wheel.writestr(name, name)
    dest = tmp_path / "lib"
    (dest / "old").mkdir(parents=True)
    pin = {**fetch.PAGE, "sha256": fetch.sha256(tmp_path / fetch.PAGE["file"])}
    fetch.provide_page(dest, tmp_path, pin)
    found = [path for path in dest.rglob("*") if path.is_file() and path.name != fetch.STAMP]
    made = {path.relative_to(dest).as_posix() for path in found}
    assert made == {name.removeprefix(folder) for name in names} | {"LICENSES.txt"}
    assert "Khan Academy" in (dest / "LICENSES.txt").read_text("utf-8")
    (tmp_path / fetch.PAGE["file"]).unlink()
    fetch.provide_page(dest, tmp_path, pin)  # nothing is fetched twice


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem[:4])
def test_a_patch_says_why_and_stays_small(patch: Path) -> None:
    head, _, diff = patch.read_text("utf-8").partition("\n---\n")
    assert len(head.split("\n\n")) >= 2, "a subject, an empty line, a reason"
    parts = diff.split("\ndiff --git ")[1:]
    lines = [line for part in parts for line in part.split("\n@@ ", 1)[1].splitlines()]
    assert sum(line[:1] in ("+", "-") for line in lines) < 200


def test_every_patch_has_a_row_and_every_row_a_patch() -> None:
    assert [row[0] for row in ROW.findall(README)] == [patch.stem for patch in PATCHES]


def test_rows_are_complete_and_name_tests_that_exist() -> None:
    for name, cells in ROW.findall(README):
        why, upstream, ready, proof, drop = (cell.strip() for cell in cells.split("|"))
        assert why and upstream and ready and drop, name
        assert_is_a_test(proof)


def assert_is_a_test(proof: str) -> None:
    file, _, test = proof.strip("`").partition("::")
    assert f"def {test}(" in (ROOT / file).read_text("utf-8"), proof


def test_every_native_file_is_in_one_row_that_names_a_test() -> None:
    listed = []
    for files, cells in NATIVE_ROW.findall(NATIVE_README):
        why, upstream, proof, drop = (cell.strip() for cell in cells.split("|"))
        assert why and upstream and drop, files
        assert_is_a_test(proof)
        for pattern in re.findall("`(.*?)`", files):
            found = sorted((ROOT / "native" / "ggml").glob(pattern))
            assert found, f"{pattern}: no such file"
            listed += found
    present = [path for path in (ROOT / "native" / "ggml").rglob("*") if path.is_file()]
    assert sorted(listed) == sorted(present)


def test_the_patch_set_changes_with_names_and_contents(fetch: ModuleType, tmp_path: Path) -> None:
    def patchset(**files: str) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            path = root / (
                "patches/0001-{}.patch" if name < "n" else "native/ggml/src/{}.cu"
            ).format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(fetch.patchset(root))

    hashes = {
        patchset(), patchset(a="x"), patchset(a="y"), patchset(b="x"), patchset(a="x", b="y"),
        patchset(a="y", b="x"), patchset(n="x"), patchset(o="x"), patchset(a="x", n="y"),
        patchset(n="x", o="y"), patchset(n="y", o="x"),
    }  # fmt: skip
    assert len(hashes) == 11
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in hashes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n2\nthree\n", r"a.txt:2: expected 'two', found '2'"),
        ("zero\none\ntwo\nthree\n", r"a.txt:1: expected 'one', found 'zero'"),
        ("one\ntwo\nthree", None),
        ("one\n", r"a.txt:2: expected 'two', found ''"),
        (None, r"a.txt does not exist"),
    ],
)
def test_a_hunk_fits_exactly_or_not_at_all(
    fetch: ModuleType, text: str | None, message: str | None
) -> None:
    diffs = fetch.unified.parse(DIFF, "p")
    if message is None:
        assert fetch.unified.apply(diffs[0], text, "p") == "one\nTWO\nthree"
        return
    with pytest.raises(fetch.unified.PatchError, match=message):
        fetch.unified.apply(diffs[0], text, "p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here\n", "holds no diff"),
        ("@@ -1,1 +1,1 @@\n a\n", "hunk before any file header"),
        ("rename from a\n", "can only change files"),
        ("deleted file mode 100644\n", "can only change files"),
        ("new file mode 100644\n", "a file of ours belongs in native/"),
        ("--- /dev/null\n+++ b/x\n", "a file of ours belongs in native/"),
        ("--- a/x\n+++ /dev/null\n", "expected '\\+\\+\\+ b/PATH'"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n one\n", "ends early"),
    ],
)
def test_a_damaged_patch_is_refused(fetch: ModuleType, text: str, message: str) -> None:
    with pytest.raises(fetch.unified.PatchError, match=message):
        fetch.unified.parse(text, "p")
