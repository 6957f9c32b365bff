"""Gather the training text: Python source found on this machine, with its sources and licences.

    python corpus.py OUT_DIR [--stdlib DIR ...] [--packages DIR]

Writes OUT_DIR/train.txt and OUT_DIR/heldout.txt (files separated by a NUL byte) and
OUT_DIR/provenance.json. CPython's standard library is the main part. Give several versions newest
first: a file of an older version is used only if most of its lines are new.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path

# Held-out modules: no training text contains their source or that of their tests.
HELD_OUT = (
    "shlex textwrap heapq bisect fractions statistics graphlib sched cmd getopt fnmatch"
    " colorsys stack_data quopri rlcompleter timeit filecmp nturl2path contextlib queue"
).split()
PACKAGES = {  # distribution: the licence that its metadata and source headers state
    "torch": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "fsspec": "BSD-3-Clause",
    "setuptools": "MIT",
}
# Tables, generated code and copies of other projects: of little use, or under another licence.
SKIP = re.compile(
    r"site-packages|lib2to3/tests/data|encodings/|cjkencodings|pydoc_data|_vendor|third_party"
    r"|__pycache__|bad_coding|badsyntax|_sysconfigdata|/config-|ensurepip|torchgen/packaged"
    r"|turtledemo|msilib|tests/.*/data/"
)
MAX_BYTES = 200_000
MIN_BYTES = 200


def read_source(path: Path) -> str | None:
    """Return the text of a source file, or None if it is unsuitable."""
    size = path.stat().st_size
    if not MIN_BYTES <= size <= MAX_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    lines = text.splitlines()
    letters = sum(c.isalpha() for c in text)
    if "\0" in text or max(map(len, lines)) > 400 or letters < 0.35 * len(text):
        return None
    return text.replace("\r\n", "\n")


class Gatherer:
    """Collects files whose lines are mostly new, with their sources."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.train: list[str] = []
        self.held_out: list[str] = []
        self.sources: list[dict[str, object]] = []

    def novel(self, text: str) -> bool:
        """Return whether most of the lines that matter are new, and remember them."""
        keys = {hash(s) for line in text.splitlines() if len(s := line.strip()) >= 16}
        fresh = len(keys - self.seen)
        self.seen |= keys
        return fresh * 2 > len(keys)

    def add(self, root: Path, keep_held_out: bool, **about: str) -> None:
        """Add every suitable file under root, and what is known about them."""
        found: list[str] = []
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if SKIP.search(relative.as_posix()) or (text := read_source(path)) is None:
                continue
            names = {part.removesuffix(".py").removeprefix("test_") for part in relative.parts}
            if not names.isdisjoint(HELD_OUT):
                self.held_out += [text] if keep_held_out else []
            elif self.novel(text):
                found.append(text)
        data = "".join(found).encode()
        digest = hashlib.sha256(data).hexdigest()
        self.sources.append({**about, "files": len(found), "bytes": len(data), "sha256": digest})
        self.train += found


def stdlib_version(root: Path) -> str:
    """Return the CPython version that a standard library folder belongs to."""
    header = root.parents[1] / "include" / root.name / "patchlevel.h"
    match = re.search(r'PY_VERSION\s+"([^"]+)"', header.read_text()) if header.exists() else None
    return match.group(1) if match else root.name.removeprefix("python")


def find_packages(folder: Path) -> list[tuple[Distribution, Path, str]]:
    """Return the known permissively licensed packages installed in a folder."""
    found = []
    for dist in distributions(path=[str(folder)]):
        name = dist.metadata["Name"].lower()
        if name in PACKAGES and (folder / name).is_dir():
            found.append((dist, folder / name, PACKAGES[name]))
    return sorted(found, key=lambda item: item[0].metadata["Name"].lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    default = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--stdlib", type=Path, nargs="+", default=[default])
    parser.add_argument("--packages", type=Path, help="a site-packages folder")
    args = parser.parse_args()
    gatherer = Gatherer()
    for i, root in enumerate(args.stdlib):
        # Held-out text comes from the newest version only: the others nearly repeat it.
        gatherer.add(root, i == 0, source="CPython standard library", version=stdlib_version(root),
                     licence="PSF-2.0")  # fmt: skip
    for dist, root, licence in find_packages(args.packages) if args.packages else []:
        gatherer.add(root, False, source=dist.metadata["Name"], version=dist.version,
                     licence=licence)  # fmt: skip
    random.Random(1).shuffle(gatherer.train)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train.txt").write_text("\0".join(gatherer.train), encoding="utf-8")
    (args.out / "heldout.txt").write_text("\0".join(gatherer.held_out), encoding="utf-8")
    report = {
        "sources": gatherer.sources, "held_out_modules": HELD_OUT,
        "held_out_files": len(gatherer.held_out),
        "held_out_bytes": sum(len(t.encode()) for t in gatherer.held_out),
    }  # fmt: skip
    (args.out / "provenance.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
