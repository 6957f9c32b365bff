"""scripts/edit_patches: patches become commits and patches again."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

FIRST = """\
A line more

For a reason.

---
 a.c | 1 +
 1 file changed, 1 insertion(+)

diff --git a/a.c b/a.c
index 0123456789..9876543210 100644
--- a/a.c
+++ b/a.c
@@ -1,2 +1,3 @@
 one
+one and a half
 two
"""
SECOND = """\
Another number

It was wrong.

---
 b.c | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

diff --git a/b.c b/b.c
index 0123456789..9876543210 100644
--- a/b.c
+++ b/b.c
@@ -1 +1 @@
-three
+four
"""


@pytest.fixture
def editor() -> ModuleType:
    """Return scripts/edit_patches as a module."""
    loader = SourceFileLoader("edit_patches", str(ROOT / "scripts" / "edit_patches"))
    spec = importlib.util.spec_from_loader("edit_patches", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def tree(editor: ModuleType, tmp_path: Path) -> tuple[Path, list[Path]]:
    """Return a repository of two patches, and the patches."""
    folder, out = tmp_path / "tree", tmp_path / "patches"
    folder.mkdir()
    out.mkdir()
    (folder / "a.c").write_text("one\ntwo\n")
    (folder / "b.c").write_text("three\n")
    (out / "0001-line.patch").write_text(FIRST)
    (out / "0002-number.patch").write_text(SECOND)
    patches = sorted(out.iterdir())
    editor.start(folder, patches)
    return folder, patches


def test_patches_that_were_not_edited_stay_as_they_are(
    editor: ModuleType, tree: tuple[Path, list[Path]]
) -> None:
    folder, patches = tree
    assert (folder / "a.c").read_text() == "one\none and a half\ntwo\n"
    assert editor.export(folder, patches, patches[0].parent) == []
    assert [path.read_text() for path in patches] == [FIRST, SECOND]


def test_an_amended_commit_changes_its_patch_alone(
    editor: ModuleType, tree: tuple[Path, list[Path]]
) -> None:
    folder, patches = tree
    (folder / "b.c").write_text("five\n")
    with pytest.raises(editor.BuildError, match="not committed"):
        editor.export(folder, patches, patches[0].parent)
    editor.git(folder, "commit", "-q", "-a", "--amend", "--no-edit")
    assert editor.export(folder, patches, patches[0].parent) == [patches[1]]
    assert "+five\n" in patches[1].read_text() and patches[0].read_text() == FIRST
    assert editor.words_of(patches[1].read_text()) == "Another number\n\nIt was wrong."
