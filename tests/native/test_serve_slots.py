"""Slots of a server in files: saved, restored and erased by name, as llama-server does it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
from helpers.patience import PATIENCE_S, until
from helpers.server_process import ServerProcess, serving

IDS = [*range(300, 900)]
COMMON = ("-c", 2048, "-np", 2, "--temp", 0, "--cpu-reference", "--cache-ram", 0)


def post(server: ServerProcess, path: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"X-Api-Key": key} if key else {}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def answer(
    server: ServerProcess, ids: list[int], key: str = "", n: int = 8
) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt were cached."""
    body = {"prompt": ids, "n_predict": n, "return_tokens": True, "ignore_eos": True}
    found = post(server, "/completion", key, **body).json()
    return found["tokens"], found["timings"]["cache_n"]


def act(server: ServerProcess, slot: int, action: str, name: str = "a", key: str = "") -> Any:
    found = post(server, f"/slots/{slot}?action={action}", key, filename=name)
    assert found.status_code == 200, found.text
    return found.json()


def refused(
    server: ServerProcess, status: int, slot: int | str, action: str, name: str = "a", key: str = ""
) -> str:
    found = post(server, f"/slots/{slot}?action={action}", key, filename=name)
    assert found.status_code == status, found.text
    return str(found.json()["error"]["message"])


def test_a_slot_goes_on_from_its_file_in_any_slot_and_process(tmp_path: Path) -> None:
    folder, name = tmp_path / "slots", "a chat.bin"
    with serving(*COMMON, "--slot-save-path", folder) as server:
        tokens, _ = answer(server, IDS)
        longer, n = [*IDS, *tokens, 5, 6, 7], len(IDS) + len(tokens) - 1
        saved = act(server, 0, "save", name)
        size = (folder / name).stat().st_size
        assert (saved["id_slot"], saved["filename"]) == (0, name)
        assert saved["timings"]["save_ms"] > 0
        assert (saved["n_saved"], saved["n_written"]) == (n, size)
        # it stays what it was: the next prompt goes on from the slot itself
        whole, n_cached = answer(server, longer)
        assert n_cached == n
        n_erased = n + 3 + len(tokens)
        assert act(server, 0, "erase") == {"id_slot": 0, "n_erased": n_erased}
        assert answer(server, longer) == (whole, 0)
        bare = httpx.post(f"{server.url}/slots/1?action=erase", timeout=PATIENCE_S)
        assert bare.json()["n_erased"] == n_erased, "no body and no type"
        page = {"Origin": "https://a.example"}
        assert httpx.post(f"{server.url}/slots/0?action=erase", headers=page).status_code == 415
        restored = act(server, 1, "restore", name)
        assert (restored["n_restored"], restored["n_read"]) == (n, size)
        assert answer(server, longer) == (whole, n)
    with serving(*COMMON, "--slot-save-path", folder) as server:
        body = {"prompt": [1, 2, 3], "n_predict": 1, "cache_prompt": False}
        assert post(server, "/completion", **body).is_success  # its slot is worth nothing
        act(server, 0, "restore", name)
        assert answer(server, longer) == (whole, n)


def test_a_busy_slot_is_saved_when_its_request_has_ended(tmp_path: Path) -> None:
    with serving(*COMMON, "--slot-save-path", tmp_path) as server:
        long = threading.Thread(target=answer, args=(server, IDS, "", 60))
        long.start()
        until(lambda: httpx.get(f"{server.url}/slots").json()[0]["is_processing"], 0.01)
        assert act(server, 0, "save")["n_saved"] == len(IDS) + 59
        long.join(PATIENCE_S)


def test_what_cannot_be_done_is_refused_in_a_line(tmp_path: Path) -> None:
    with serving(*COMMON, "--slot-save-path", tmp_path) as server:
        assert refused(server, 400, 0, "save") == "slot 0 holds nothing"
        assert refused(server, 400, 2, "save") == "there is no slot 2"
        assert "action is none of" in refused(server, 400, 0, "move")
        assert "no such file" in refused(server, 400, 0, "restore", "none").lower()
        for name in ("", "../x", "a/b", "a..b", "x.", " x", "a\nb", "é" * 128, "a:b"):
            assert "no name of a file" in refused(server, 400, 0, "save", name)
        answer(server, IDS, n=1)
        act(server, 0, "save")
        data = bytearray((tmp_path / "a").read_bytes())
        data[-20] ^= 1
        (tmp_path / "b").write_bytes(data)
        (tmp_path / "c").symlink_to("a")
        assert "the hash of the states is wrong" in refused(server, 400, 0, "restore", "b")
        assert refused(server, 400, 0, "restore", "c").startswith("unable to restore slot: ")
        assert str(tmp_path) not in refused(server, 400, 0, "restore", "c")
        assert answer(server, [*IDS, 5])[1] == len(IDS), "the slot is as it was"
    with serving(*COMMON, "--slot-save-path", tmp_path, "-ctk", "q8_0") as server:
        assert "other settings" in refused(server, 400, 0, "restore")
    with serving(*COMMON) as server:
        found = post(server, "/slots/0?action=save", filename="a")
        assert found.status_code == 501
        assert found.json()["error"]["type"] == "not_supported_error"


def test_a_file_that_is_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    rest = (*COMMON[2:], "--slot-save-path", tmp_path)
    with serving(*COMMON, "--slot-save-path", tmp_path) as server:
        answer(server, IDS[:390])
        assert act(server, 0, "save")["n_saved"] == 397
    with serving("-c", 300, *rest) as server:  # the pages of the cache would have room for it
        assert "the context holds 300" in refused(server, 400, 0, "restore")
        assert answer(server, IDS[:20]) is not None


def test_files_and_slots_of_another_key_are_not_given(tmp_path: Path) -> None:
    keys = ("--api-key", "one,two", "--cache-by-key")
    with serving(*COMMON, *keys, "--slot-save-path", tmp_path) as server:
        answer(server, IDS, "one", n=1)
        act(server, 0, "save", key="one")
        for action in ("save", "erase"):
            assert "another key" in refused(server, 400, 0, action, key="two")
        assert "another key" in refused(server, 400, 1, "restore", key="two")
        act(server, 1, "restore", key="one")
        assert answer(server, [*IDS, 5], "two")[1] == 0
