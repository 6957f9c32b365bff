"""Models of a hub: which file a name means, downloads that break off, checksums, the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner
from helpers.fake_hub import COMMIT, FakeHub
from helpers.ggufbytes import File, T, kv
from huggingface_hub import constants, file_download

from moegraph.cli import main, models
from moegraph.cli.options import build_config
from moegraph.config import EngineConfig
from moegraph.errors import ConfigError, ModelFileError
from moegraph.ggml.free_memory import HostMemory
from moegraph.gguf.hub import download, get_mmproj, get_model
from moegraph.gguf.hubcache import remove_model
from moegraph.gguf.hubnames import HubName, choose_files, mmproj_for, parse_hub_name
from moegraph.gguf.resolve import resolve_draft, resolve_target
from moegraph.placement.footprint import ENCODER_BYTES
from moegraph.text.pictures import find_mmproj

REPO = "some-one/Model-GGUF"
DATA = bytes(range(256)) * 40_000  # 10 MB, more than one piece of a download
FILE = "Model-Q4_K_M.gguf"


@pytest.mark.parametrize(
    "text, repo, pick",
    [
        ("a/b", "a/b", None),
        ("hf:a/b:Q8_0", "a/b", "Q8_0"),
        ("Some-One/x.y_z-1:UD-Q4_K_XL", "Some-One/x.y_z-1", "UD-Q4_K_XL"),
        ("a/b:sub/x-Q4_0.gguf", "a/b", "sub/x-Q4_0.gguf"),
    ],
)
def test_names(text: str, repo: str, pick: str | None) -> None:
    assert parse_hub_name(text) == HubName(repo, pick)


@pytest.mark.parametrize(
    "text",
    ["", "a", "a/", "/b", "a/b/c", "a/b:", "a/b:x:y", "a/../b", "../b", "a/b:../../x.gguf", "a/b c",
     "-a/b", "a--b/c", "hf:", "a/b\n"],
)  # fmt: skip
def test_names_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no model on a hub"):
        parse_hub_name(text)


FILES = [
    "README.md", "mmproj-F16.gguf", "imatrix_unsloth.gguf", "M-Q8_0.gguf", "M-UD-Q4_K_M.gguf",
    "M-UD-Q2_K_XL.gguf", "M-Q2_K_XL.gguf", "BF16/M-BF16-00001-of-00002.gguf",
    "BF16/M-BF16-00002-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    "pick, wanted",
    [
        (None, ("M-UD-Q4_K_M.gguf",)),
        ("q8_0", ("M-Q8_0.gguf",)),
        ("Q2_K_XL", ("M-Q2_K_XL.gguf",)),
        ("ud-q2_k_xl", ("M-UD-Q2_K_XL.gguf",)),
        ("BF16", ("BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf")),
        ("mmproj-F16.gguf", ("mmproj-F16.gguf",)),
    ],
)
def test_the_file_that_a_name_means(pick: str | None, wanted: tuple[str, ...]) -> None:
    assert choose_files(FILES, HubName(REPO, pick)) == wanted


@pytest.mark.parametrize(
    "files, pick, message",
    [
        (FILES, "Q5_K_M", "quantization Q5_K_M; there are BF16, Q2_K_XL, Q8_0, UD-Q2_K_XL, UD-Q4"),
        (FILES, "M-Q5_0.gguf", "no file M-Q5_0.gguf; there are BF16/M-BF16-00001-of-00002.gguf, M"),
        (["a-Q8_0.gguf", "b-Q6_K.gguf"], None, "Q4_K_M, the default; there are Q6_K, Q8_0"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, "several files fit: a-Q4_K_M.gguf, b-Q4_K_M"),
        (["README.md", "mmproj-F16.gguf"], None, "no GGUF file of a model"),
        (["m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"], "Q8_0",
         "parts of a split file are missing: m-Q8_0-00002-of-00003.gguf"),
    ],
)  # fmt: skip
def test_names_that_mean_no_file(files: list[str], pick: str | None, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        choose_files(files, HubName(REPO, pick))


@pytest.mark.parametrize(
    "model, encoders, wanted",
    [
        ("M-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-Q8_0.gguf", "x/mmproj-Q4_0.gguf"],
         "mmproj-Q8_0.gguf"),
        ("M-BF16.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"],
         "mmproj-BF16.gguf"),
        ("Q4/M-Q4_0-00001-of-00002.gguf", ["mmproj-Q4_0.gguf", "Q4/a-mmproj-f16.gguf"],
         "Q4/a-mmproj-f16.gguf"),
        ("Q4/M-Q4_0.gguf", ["mmproj.gguf", "Q8/mmproj-Q4_0.gguf"], "mmproj.gguf"),
        ("M-Q4_0.gguf", ["Q4/mmproj-Q4_0.gguf", "mmproj.txt", "mmproj/M-Q8_0.gguf"], None),
    ],
)  # fmt: skip
def test_the_picture_encoder_of_a_model(
    model: str, encoders: list[str], wanted: str | None
) -> None:
    assert mmproj_for(model, [*encoders, model, "M-Q8_0.gguf"]) == wanted


@pytest.mark.parametrize(
    "names, wanted",
    [
        (["mmproj-F16.gguf", "mmproj-q8_0.gguf"], "mmproj-q8_0.gguf"),
        (["a-mmproj-F16.gguf"], "a-mmproj-F16.gguf"),
        (["a-mmproj-F16.gguf", "b-mmproj-F16.gguf"], None),  # of which model?
    ],
)
def test_the_picture_encoder_beside_a_file(
    tmp_path: Path, names: list[str], wanted: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert find_mmproj(tmp_path / "M-Q4_K_M.gguf") == (wanted and tmp_path / wanted)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub with one model; the library asks it, and has an empty cache."""
    with FakeHub({REPO: {FILE: DATA, "README.md": b"text"}}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500_000)
        monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
        monkeypatch.setenv("HF_TOKEN", "")
        yield hub


class Watch:
    """Collects the lines and the progress of a download; may interrupt it."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.lines: list[str] = []
        self.done: list[tuple[str, int, int]] = []
        self.stop_at = stop_at

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.done.append((stage, done, total))
        if stage == "download" and self.stop_at is not None and done >= self.stop_at:
            raise KeyboardInterrupt


def leftovers(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.moegraph-part"))


def test_a_model_is_downloaded_once(hub: FakeHub, tmp_path: Path) -> None:
    watch = Watch()
    path = resolve_target(f"hf:{REPO}", watch, watch.lines.append)
    assert path.read_bytes() == DATA and path.name == FILE and COMMIT in path.parts
    assert "downloading Model-Q4_K_M.gguf of some-one/Model-GGUF (9.77 MiB) to" in watch.lines[0]
    assert watch.done[0] == ("download", 0, len(DATA))
    assert ("download", len(DATA), len(DATA)) in watch.done
    assert watch.done[-1] == ("checksum", len(DATA), len(DATA))
    assert leftovers(tmp_path) == []
    # the library itself finds it where it would have put it
    assert huggingface_hub.try_to_load_from_cache(REPO, FILE) == str(path)
    hub.seen.clear()
    assert get_model(HubName(REPO)) == path and hub.seen == []


QUANTS = {"M-Q4_K_M.gguf": b"4" * 400, "M-Q8_0.gguf": b"8" * 800, "M-Q2_K.gguf": b"2" * 200,
          "M-Q3_K_M-00001-of-00002.gguf": b"3" * 200, "M-Q3_K_M-00002-of-00002.gguf": b"3" * 100,
          "mmproj-F16.gguf": b"0" * 20}  # fmt: skip


@pytest.mark.parametrize(
    "room, file, said",
    [
        (400, "M-Q4_K_M.gguf", ""),
        (5000, "M-Q4_K_M.gguf", ""),
        (399, "M-Q3_K_M-00001-of-00002.gguf",
         "taking M-Q3_K_M-00001-of-00002.gguf (300 B), because M-Q4_K_M.gguf (400 B) does not fit "
         "into 399 B of memory"),
        (299, "M-Q2_K.gguf", "taking M-Q2_K.gguf (200 B), because"),
        (100, "M-Q4_K_M.gguf",
         "M-Q4_K_M.gguf (400 B) does not fit into 100 B of memory, nor does any other; a part is"),
    ],
)  # fmt: skip
def test_a_quantization_that_fits_is_taken_where_none_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, room: int, file: str, said: str
) -> None:
    hub.files[REPO], watch = QUANTS, Watch()
    path = get_model(HubName(REPO), watch, watch.lines.append, lambda: room)
    assert path.name == file and watch.lines[0].startswith(said or "downloading M-Q4_K_M.gguf")
    hub.seen.clear()
    # it stays, whatever is free the next time
    assert get_model(HubName(REPO), room=lambda: 5000) == path and hub.seen == []
    assert get_model(HubName(REPO, "Q8_0"), room=lambda: 1).name == "M-Q8_0.gguf"


def test_the_memory_of_card_and_host_counts(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files[REPO] = QUANTS
    monkeypatch.setattr(models, "card_bytes", lambda: 200)
    monkeypatch.setattr(models, "host_memory", lambda: HostMemory(100, 100 + 12, None))
    monkeypatch.setattr(models, "_FOR_CONTEXT", 0)
    assert models.memory_for_model() == 300
    assert models.local_path(f"hf:{REPO}").name == "M-Q3_K_M-00001-of-00002.gguf"
    assert capsys.readouterr().err.startswith("taking M-Q3_K_M")


def test_a_drafter_may_be_on_a_hub_too(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config({"draft": f"hf:{REPO}"})
    assert Path(config.draft).read_bytes() == DATA and config.spec == "auto"
    assert "downloading Model-Q4_K_M.gguf" in capsys.readouterr().err
    hub.seen.clear()
    assert resolve_draft(f"hf:{REPO}") == Path(config.draft) and hub.seen == []
    assert resolve_draft("a/folder") == Path("a/folder")
    with pytest.raises(ModelFileError, match="no file with the quantization Q9_9"):
        build_config({"draft": f"hf:{REPO}:Q9_9"})
    with pytest.raises(ConfigError, match="names no model on a hub"):
        build_config({"draft": "hf:nobody"})


def test_the_encoder_of_a_repository_comes_with_the_model(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.files[REPO] = {FILE: b"model", "mmproj-F16.gguf": b"16", "mmproj-F32.gguf": b"32"}
    model, watch = get_model(HubName(REPO)), Watch()
    hub.commit = "beef" + "0" * 36  # the encoder is that of the model's revision
    found = get_mmproj(model, REPO, watch, watch.lines.append)
    assert found == model.parent / "mmproj-F16.gguf" and found.read_bytes() == b"16"
    assert watch.lines[0].startswith("downloading mmproj-F16.gguf of some-one/Model-GGUF")
    assert f"GET /api/models/{REPO}/revision/{COMMIT}" in hub.seen
    hub.seen.clear()
    assert get_mmproj(model, REPO, watch, watch.lines.append) == found
    assert get_model(HubName(REPO)) == model and hub.seen == []
    # with the model goes the encoder
    assert remove_model(HubName(REPO)) == 7 and not list(tmp_path.glob("cache/models--*"))
    hub.files[REPO] = {FILE: b"model"}
    model = get_model(HubName(REPO))
    assert get_mmproj(model, REPO, watch, watch.lines.append) is None and len(watch.lines) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get_mmproj(model, REPO, watch, watch.lines.append) is None
    assert watch.lines[1].startswith(f"no pictures: hf:{REPO}: not in the cache, and HF_HUB_OFF")


def test_which_encoder_a_command_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, asked = tmp_path / "M.gguf", list[str]()
    encoder = tmp_path / "mmproj-F16.gguf"
    encoder.write_bytes(File([kv("general.architecture", T.STRING, "clip")]).build())
    monkeypatch.setattr(models, "get_mmproj", lambda _, repo, *__: asked.append(repo))
    model = SimpleNamespace(path=path, hparams=SimpleNamespace(rope_sections=(1, 1, 1), n_embd=8))
    many = SimpleNamespace(many=SimpleNamespace(n=1))
    stages = [SimpleNamespace(plan=SimpleNamespace(margin=None))]
    engine: Any = SimpleNamespace(
        file=model, hparams=model.hparams, threads=many, config=EngineConfig(), device_name="cpu",
        stage_plans=stages,
    )  # fmt: skip

    def opens(target: str, no_mmproj: bool = False, mmproj: str | None = None) -> bool:
        given = {"mmproj": mmproj, "no_mmproj": no_mmproj}
        return models.open_pictures(given, target, engine) is not None

    assert opens(str(path)) and opens(f"hf:{REPO}", mmproj=str(encoder)) and asked == []
    assert not opens(f"hf:{REPO}:Q8_0") and asked == [REPO]
    assert not opens(f"hf:{REPO}", True) and not opens(str(path), True) and asked == [REPO]
    notes = list[str]()
    monkeypatch.setattr(models.ui, "note", notes.append)
    monkeypatch.setattr("moegraph.ggml.device.gpu_names", lambda: ["cuda:0", "cuda:1"])
    for wanted, name, margin, device, n_notes in (
        ("auto", "cuda:0,cuda:1", 2 * ENCODER_BYTES, "cuda:0", 0),
        ("auto", "cuda:0", 2 * ENCODER_BYTES - 2, "cpu", 1), ("cpu", "cuda:0", 1 << 60, "cpu", 0),
        ("auto", "rpc://h:1", 1 << 60, "cpu", 1), ("cuda:1", "cuda:0", 0, "cuda:1", 0),
    ):  # fmt: skip
        engine.device_name, stages[0].plan.margin = name, margin
        engine.config = EngineConfig(mmproj_device=wanted)
        found = models.open_pictures({"mmproj": None, "no_mmproj": False}, str(path), engine)
        assert found and found._asked["device"] == device
        assert len(notes) == n_notes and all("--mmproj-device cuda:N" in one for one in notes)
        notes.clear()
    engine.config = EngineConfig(mmproj_device="cuda:2")
    with pytest.raises(ConfigError, match="cuda:2: no such GPU"):
        opens(str(path))
    engine.config, model.hparams.rope_sections = EngineConfig(), ()
    assert not opens(f"hf:{REPO}") and asked == [REPO], "the family reads none"


def test_a_download_that_is_cut_goes_on_where_it_stopped(hub: FakeHub) -> None:
    hub.cuts = [1_000_000, 2_000_000]
    assert get_model(HubName(REPO)).read_bytes() == DATA
    assert hub.ranges == [None, "bytes=1000000-", "bytes=3000000-"]


def test_a_download_that_was_interrupted_goes_on_next_time(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        get_model(HubName(REPO), Watch(stop_at=2_000_000))
    (part,) = leftovers(tmp_path)
    n_held = part.stat().st_size
    assert n_held >= 1_500_000
    hub.ranges.clear()
    watch = Watch()
    assert get_model(HubName(REPO), watch, watch.lines.append).read_bytes() == DATA
    assert hub.ranges == [f"bytes={n_held}-"]
    assert watch.done[0] == ("download", n_held, len(DATA))


def test_what_was_held_is_checked_too(hub: FakeHub, tmp_path: Path) -> None:
    """A damaged first part spoils the whole file: it is dropped, and the next try is whole."""
    blobs = tmp_path / "cache" / "models--some-one--Model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.etag(REPO, FILE)}.moegraph-part").write_bytes(b"x" * 5000)
    watch = Watch()
    with pytest.raises(ModelFileError, match="checksum of Model-Q4_K_M.gguf is wrong"):
        get_model(HubName(REPO), watch, watch.lines.append)
    assert "4.88 KiB of it are there" in watch.lines[0] and hub.ranges == ["bytes=5000-"]
    assert leftovers(tmp_path) == []
    assert get_model(HubName(REPO)).read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.told[FILE] = "0" * 64
    with pytest.raises(ModelFileError, match=r"wrong after the download; nothing of it was kept"):
        get_model(HubName(REPO))
    assert leftovers(tmp_path) == [] and not list(tmp_path.rglob("*.gguf"))


def test_parts_come_in_order(hub: FakeHub) -> None:
    hub.files[REPO] = {f"m-Q8_0-0000{i}-of-00003.gguf": bytes([i]) * 1000 * i for i in (1, 2, 3)}
    watch = Watch()
    path = get_model(HubName(REPO, "Q8_0"), watch, watch.lines.append)
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    parts = sorted(path.parent.iterdir())
    assert [p.read_bytes() for p in parts] == [bytes([i]) * 1000 * i for i in (1, 2, 3)]
    downloaded = [done for stage, done, total in watch.done if stage == "download"]
    assert downloaded == sorted(downloaded) and downloaded[-1] == 6000
    assert "3 parts of m-Q8_0-00001-of-00003.gguf" in watch.lines[0]


def test_only_download_asks_for_a_newer_file(hub: FakeHub) -> None:
    old = get_model(HubName(REPO))
    hub.files[REPO][FILE], hub.commit = b"new", "beef" + "0" * 36
    assert get_model(HubName(REPO)) == old
    new = download(HubName(REPO))
    assert new.read_bytes() == b"new" and get_model(HubName(REPO)) == new
    assert old.read_bytes() == DATA


def test_download_mends_a_damaged_file(hub: FakeHub) -> None:
    path = get_model(HubName(REPO))
    path.resolve().write_bytes(DATA[:-1] + b"?")
    watch = Watch()
    assert download(HubName(REPO), watch, watch.lines.append, verify=True) == path
    assert path.read_bytes() == DATA
    assert watch.lines[0] == "Model-Q4_K_M.gguf in the cache is damaged; downloading it again"
    hub.ranges.clear()
    download(HubName(REPO), verify=True)
    assert hub.ranges == []


def test_two_processes_download_a_file_once(hub: FakeHub) -> None:
    """Whoever comes second waits, and takes what the first has brought."""
    began, lines = threading.Event(), list[str]()
    may_go_on = threading.Event()

    def slow(stage: str, done: int, _: int) -> None:
        began.set()
        assert may_go_on.wait(120)

    def say(line: str) -> None:
        lines.append(line)
        if "waiting" in line:
            may_go_on.set()

    first = threading.Thread(target=get_model, args=(HubName(REPO), slow))
    first.start()
    assert began.wait(120)
    path = get_model(HubName(REPO), say=say)
    first.join()
    assert path.read_bytes() == DATA and hub.ranges == [None]
    assert lines[-1] == "another process is downloading this file; waiting for it"


def test_without_the_network_the_cache_serves(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files[REPO] = {"m-Q8_0.gguf": b"eight"}
    path = get_model(HubName(REPO))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lines: list[str] = []
    # Q8_0 is not the default: the hub might have a Q4_K_M by now, but cannot be asked.
    assert get_model(HubName(REPO), say=lines.append) == path
    assert "HF_HUB_OFFLINE forbids to download it; using" in lines[0]
    assert get_model(HubName(REPO, "Q8_0"), say=lines.append) == path and len(lines) == 1
    with pytest.raises(ModelFileError, match="hf:some-one/Model-GGUF:Q4_0: not in the cache, and"):
        get_model(HubName(REPO, "Q4_0"))


def test_a_hub_that_does_not_answer(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(ModelFileError, match="cannot download from http://127.0.0.1:9 "):
        get_model(HubName(REPO))
    assert waits == []  # the user tries again, not the library


def test_tokens(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(ModelFileError, match="or it is private; check the name, and set HF_TOKEN"):
        get_model(HubName(REPO))
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ModelFileError, match="refuses the token; check HF_TOKEN"):
        get_model(HubName(REPO))
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.gated = True
    with pytest.raises(ModelFileError, match="access is restricted; accept the terms at http"):
        get_model(HubName(REPO))
    hub.gated = False
    assert get_model(HubName(REPO)).read_bytes() == DATA


def test_a_list_without_models_says_how_to_get_one(hub: FakeHub) -> None:
    done = CliRunner().invoke(main, ["models"])
    assert (done.exit_code, done.stdout) == (0, "") and "moegraph pull" in done.stderr


def test_models_are_listed_and_removed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"M-Q8_0.gguf": b"12345", "M-IQ2_M-00001-of-00002.gguf": b"12",
             "M-IQ2_M-00002-of-00002.gguf": b"3"}  # fmt: skip
    hub.files["a/b"] = small
    for name in (REPO, "a/b:Q8_0", "a/b:IQ2_M"):
        get_model(parse_hub_name(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEGRAPH_HF_REPO", REPO)

    def told(*args: str) -> list[list[str]]:
        done = CliRunner().invoke(main, ["models", *args])
        assert done.exit_code == 0, done.output
        return [line.split() for line in done.stdout.splitlines()]

    day = time.strftime("%Y-%m-%d")
    assert told() == [
        ["hf:a/b:IQ2_M", "IQ2_M", "3", "B", day],
        ["hf:a/b:Q8_0", "Q8_0", "5", "B", day],
        ["*", f"hf:{REPO}:Q4_K_M", "Q4_K_M", "9.77", "MiB", day],
    ]
    assert told("rm", "a/b:IQ2_M") == []
    assert [row[0] for row in told()] == ["hf:a/b:Q8_0", "*"]
    assert get_model(parse_hub_name("a/b:Q8_0")).read_bytes() == b"12345"
    told("rm", "hf:a/b:Q8_0", REPO)
    assert told() == [["*", f"hf:{REPO}"]]
    assert list((tmp_path / "cache").glob("models--*")) == []
    for args, told_line in ((("rm", REPO), "not in the cache"), (("rm",), "rm NAME")):
        done = CliRunner().invoke(main, ["models", *args])
        assert done.exit_code in (2, 3) and told_line in done.stderr


def test_removing_keeps_what_another_revision_or_file_has(hub: FakeHub) -> None:
    old = get_model(HubName(REPO))
    other = old.parents[1] / "older"
    other.mkdir()
    (other / FILE).symlink_to(old.resolve())
    (old.parent / "same-Q8_0.gguf").symlink_to(old.resolve())
    assert remove_model(HubName(REPO, "Q4_K_M")) == 0
    assert not (other / FILE).exists() and (old.parent / "same-Q8_0.gguf").read_bytes() == DATA


def test_removing_a_link_keeps_the_file_elsewhere(hub: FakeHub, tmp_path: Path) -> None:
    link, mine = get_model(HubName(REPO)).parent / "mine-Q8_0.gguf", tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    link.symlink_to(mine)
    assert remove_model(HubName(REPO, "Q8_0")) == 0 and not link.is_symlink() and mine.exists()


def test_a_disk_that_is_too_small(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(ModelFileError, match=r"9.77 MiB to download, and .* has 1.00 MiB free"):
        get_model(HubName(REPO))


def test_without_the_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="need the package huggingface_hub, which is not install"):
        get_model(HubName(REPO))


def moegraph(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moegraph", *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_pull_from_the_shell(tmp_path: Path) -> None:
    cache = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    with FakeHub({REPO: {"m-Q8_0.gguf": DATA[:1000]}}) as hub:
        done = moegraph("pull", f"{REPO}:Q8_0", HF_ENDPOINT=hub.url, **cache)
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip())
        assert path.read_bytes() == DATA[:1000] and path.is_relative_to(tmp_path)
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("downloading m-Q8_0.gguf")
        missing = moegraph("pull", f"{REPO}:Q4_0", HF_ENDPOINT=hub.url, **cache)
        assert missing.returncode == 3 and missing.stdout == ""
        assert missing.stderr == (
            f"error: {REPO}: no file with the quantization Q4_0; there are Q8_0\n"
        )
    # -hf takes the file from the cache, without the hub; it is no model, which inspect says
    done = moegraph("inspect", "-hf", f"{REPO}:Q8_0", HF_ENDPOINT="http://127.0.0.1:9", **cache)
    assert done.returncode == 3 and str(path) in done.stderr
