#!/usr/bin/env python3
"""Put our llama.cpp into a folder: fetch the pinned source, verify, unpack, patch, add our files.

CMake and people run it. If the folder is up to date, it does nothing. After a change in patches/ or
native/ it writes only the files that differ, so that little is compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import unified

ROOT = Path(__file__).resolve().parent.parent
Pin = Mapping[str, str]
PIN: Pin = json.loads((ROOT / "vendor" / "pin.json").read_text("utf-8"))
# The newest llama.cpp, which measurements compare with: from another package, never patched.
RIVAL: Pin = json.loads((ROOT / "vendor" / "rival.json").read_text("utf-8"))
# KaTeX and highlight.js for the server's page: a package has them as they were published.
PAGE: Pin = json.loads((ROOT / "vendor" / "page.json").read_text("utf-8"))
STAMP = ".moegraph-stamp"
PRISTINE = ".moegraph-pristine"
NATIVE_SUFFIXES = (".c", ".cpp", ".cu", ".cuh", ".h")


class FetchError(Exception):
    """The source cannot be provided; the message is the one line that a user sees."""


def say(text: str) -> None:
    print(f"moegraph: {text}", flush=True)


def patch_files(root: Path = ROOT) -> list[Path]:
    """List the patches in the order in which they apply."""
    return sorted((root / "patches").glob("[0-9]*.patch"))


def native_files(root: Path = ROOT) -> dict[str, Path]:
    """Return our own source files by their path in the tree, sorted."""
    folder = root / "native"
    found = (path for path in (folder / "ggml").rglob("*") if path.suffix in NATIVE_SUFFIXES)
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def patchset(root: Path = ROOT) -> str:
    """Return 16 hex digits that change with every patch and native file: name, content, order."""
    digest = hashlib.sha256()
    for path in [*patch_files(root), *native_files(root).values()]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_unpacked(folder: Path, pin: Pin = PIN) -> bool:
    """Return whether a folder holds the pinned source: unpacked, or a tree that `provide` made."""
    stamp, about = folder / STAMP, folder / "PKG-INFO"
    if stamp.is_file():
        return _is_of(stamp.read_text("utf-8"), pin)
    text = about.read_text("utf-8") if about.is_file() else ""
    return f"\nVersion: {pin['version']}\n" in text and _inside(folder, pin).is_dir()


def _inside(folder: Path, pin: Pin) -> Path:
    """Return where llama.cpp lies in the unpacked source distribution."""
    return folder.joinpath(*Path(pin["llama_cpp_path"]).parts[1:])


def _is_of(state: str, pin: Pin) -> bool:
    return f'"sdist": "{pin["sha256"]}"' in state


def verify(path: Path, pin: Pin = PIN) -> Path:
    """Return `path` if it is the pinned source distribution, packed or not.

    Raises:
        FetchError: there is no such file, its sha256 differs from the pin's, or a folder holds
            another version.
    """
    if path.is_dir():
        if is_unpacked(path, pin):
            return path
        raise FetchError(
            f"{path} is not {pin['package']} {pin['version']} unpacked, nor a folder llama.cpp that"
            " scripts/build made of it"
        )
    if not path.is_file():
        raise FetchError(f"{path}: no such file; expected {pin['file']}")
    found = sha256(path)
    if found != pin["sha256"]:
        raise FetchError(
            f"{path}: sha256 is {found}, vendor/ wants {pin['sha256']};"
            " delete the file and try again"
        )
    return path


def download(cache: Path, pin: Pin = PIN) -> Path:
    """Fetch what is pinned with pip into `cache`; pip checks the hash as well."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip to fetch {pin['file']}; install pip, or put a copy of"
            f" that file into {cache}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    say(f"fetching {pin['file']} with pip")
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        wanted = Path(tmp) / "requirement.txt"
        wanted.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        kind = "--only-binary" if pin["file"].endswith(".whl") else "--no-binary"
        command += [kind, pin["package"], "--require-hashes", "-r", str(wanted)]
        command += ["-d", tmp]
        # pip asks the build backend for metadata; if it is installed, no environment is needed
        if pin is PIN and importlib.util.find_spec("scikit_build_core") is not None:
            command.append("--no-build-isolation")
        done = subprocess.run(command, check=False)
        got = Path(tmp) / pin["file"]
        if done.returncode != 0 or not got.is_file():
            raise FetchError(
                f"pip could not fetch {pin['package']} {pin['version']} (see above); without a"
                f" package index, put a copy of {pin['file']} into {cache}"
            )
        return Path(shutil.move(verify(got, pin), cache / pin["file"]))


def find_sdist(given: str | None, cache: Path, pin: Pin = PIN) -> Path:
    """Return a verified source: the one given, the cached one, an earlier build's, or a download.

    A folder is the source distribution unpacked, or llama.cpp as an earlier build left it.
    """
    named = given or (os.environ.get("MOEGRAPH_SDIST") if pin is PIN else None)
    if named:
        return verify(Path(named).expanduser(), pin)
    cached = cache / pin["file"]
    if cached.is_file() and sha256(cached) == pin["sha256"]:
        return cached
    built = cache.parent / "llama.cpp"
    return built if built.is_dir() and is_unpacked(built, pin) else download(cache, pin)


def unpack(sdist: Path, dest: Path, pin: Pin = PIN) -> None:
    """Replace `dest` by the llama.cpp folder of the source distribution, without its git link."""
    say(f"unpacking llama.cpp {pin['llama_cpp_commit']} into {dest}")
    if sdist.is_dir():
        source = _inside(sdist, pin) if _inside(sdist, pin).is_dir() else sdist
        shutil.rmtree(dest, ignore_errors=True)
        shutil.copytree(source, dest, ignore=shutil.ignore_patterns(".git", STAMP))
        return
    prefix = pin["llama_cpp_path"] + "/"
    if dest.exists():
        shutil.rmtree(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent) as tmp:
        with tarfile.open(sdist) as tar:
            for member in tar:
                path = member.name[len(prefix) :]
                if not member.name.startswith(prefix) or path == ".git":
                    continue
                if not (member.isfile() or member.isdir()) or ".." in Path(path).parts:
                    raise FetchError(f"{sdist}: refused to unpack {member.name!r}")
                tar.extract(member, tmp)
        shutil.move(Path(tmp) / pin["llama_cpp_path"], dest)


def apply(dest: Path, patches: list[Path], native: Mapping[str, Path]) -> list[str]:
    """Make `dest` the pristine source with patches and native files; return the paths written.

    PRISTINE keeps the original text of every file that this changes, so that other patches and
    files can follow in the same folder.

    Raises:
        FetchError: llama.cpp has a file where a native file goes; the folder is unchanged.
        unified.PatchError: a patch does not apply; the folder is unchanged.
    """
    pristine = dest / PRISTINE

    def read(path: str) -> str | None:
        for folder in (pristine, dest):
            if (folder / path).is_file():
                text = (folder / path).read_text("utf-8")
                return None if folder is pristine and not text else text
        return None

    texts = unified.apply_series([(p.name, p.read_text("utf-8")) for p in patches], read)
    for path, ours in native.items():
        if read(path) is not None:
            raise FetchError(f"{ours}: llama.cpp has a file of that name; give ours another")
        texts[path] = ours.read_text("utf-8")
    before = {p.relative_to(pristine).as_posix() for p in pristine.rglob("*") if p.is_file()}
    for path in texts.keys() - before:
        (pristine / path).parent.mkdir(parents=True, exist_ok=True)
        old = dest / path
        # an empty file means that upstream has none: no upstream file that we patch is empty
        (pristine / path).write_text(old.read_text("utf-8") if old.is_file() else "", "utf-8")
    written = []
    for path in sorted(texts.keys() | before):
        wanted = texts.get(path) or read(path)
        target = dest / path
        if wanted is None:
            target.unlink(missing_ok=True)
        elif not target.is_file() or target.read_text("utf-8") != wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(wanted, "utf-8")
            written.append(path)
    return written


def provide(
    dest: Path, cache: Path, given: str | None = None, pristine: bool = False, pin: Pin = PIN
) -> None:
    """Make `dest` hold the pinned llama.cpp: as it is if `pristine`, else with all that is ours."""
    ours = "none" if pristine else patchset()
    state = json.dumps({"sdist": pin["sha256"], "patchset": ours})
    stamp = dest / STAMP
    found = stamp.read_text("utf-8") if stamp.is_file() else ""
    if found == state:
        return
    if not _is_of(found, pin):
        unpack(find_sdist(given, cache, pin), dest, pin)
        stamp.write_text(json.dumps({"sdist": pin["sha256"]}), "utf-8")
    patches, native = ([], {}) if pristine else (patch_files(), native_files())
    written = apply(dest, patches, native)
    stamp.write_text(state, "utf-8")
    say(
        f"{len(patches)} patches and {len(native)} native files ({len(written)} files written),"
        f" patch set {ours}"
    )


def provide_page(dest: Path, cache: Path, pin: Pin = PAGE) -> None:
    """Make `dest` hold the libraries of the server's page and their licences, and nothing else."""
    stamp = dest / STAMP
    if stamp.is_file() and stamp.read_text("utf-8") == pin["sha256"]:
        return
    wheel = cache / pin["file"]
    if not wheel.is_file() or sha256(wheel) != pin["sha256"]:
        wheel = download(cache, pin)
    shutil.rmtree(dest, ignore_errors=True)
    with zipfile.ZipFile(wheel) as zipped:
        for path in zipped.namelist():
            name = path.removeprefix(pin["folder"])
            is_font = Path(name).parts[0] == "fonts" and name.endswith(".woff2")
            if path.startswith(pin["folder"]) and (is_font or name in pin["files"].split()):
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                (dest / name).write_bytes(zipped.read(path))
    shutil.copy2(ROOT / "vendor" / "page.txt", dest / "LICENSES.txt")
    stamp.write_text(pin["sha256"], "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, help="folder for our llama.cpp")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "cache", help="downloads")
    parser.add_argument("--sdist", help=f"{PIN['file']} or its folder (also MOEGRAPH_SDIST)")
    parser.add_argument("--pristine", action="store_true", help="change nothing in it")
    parser.add_argument("--page", type=Path, help="folder for the libraries of the server's page")
    parser.add_argument("--patchset", action="store_true", help="print the patch set's hash")
    args = parser.parse_args()
    try:
        if args.patchset:
            print(patchset())
        if args.page is not None:
            provide_page(args.page.resolve(), args.cache)
        elif args.dest is not None:
            provide(args.dest.resolve(), args.cache, args.sdist, args.pristine)
        elif not args.patchset:
            print(find_sdist(args.sdist, args.cache))
    except (FetchError, unified.PatchError, OSError, tarfile.TarError) as e:
        print(f"moegraph: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
