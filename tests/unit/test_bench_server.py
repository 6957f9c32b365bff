"""scripts/bench_server.py: what it makes of a server's answers."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_server import Stream, free_port, long_prompt, measure, served, throughput

PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Answer(BaseHTTPRequestHandler):
    """The bytes at `body`; at `long`, if the prompt has 100 tokens."""

    body = long = b""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.long if len(asked.get("prompt", ())) == 100 else self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_whole_stream_is_no_error(port: int) -> None:
    Answer.body = PIECE * 3 + DONE
    stream = Stream(port, "/v1/completions", {}).send().done()
    assert len(stream.times) == 3 and stream.text == "aaa"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (PIECE, "without its last line"),
        (b"", "without its last line"),
        (PIECE + b'data: {"error": {"message": "no memory"}}\n\n' + DONE, "no memory"),
    ],
)
def test_an_answer_that_breaks_off_is_not_measured(port: int, body: bytes, says: str) -> None:
    Answer.body = body
    with pytest.raises(RuntimeError, match=says):
        Stream(port, "/v1/completions", {}).send().done()


@pytest.mark.parametrize("n_pieces", [1, 3])
def test_answers_of_one_token_have_no_speed_of_decoding(port: int, n_pieces: int) -> None:
    Answer.body = PIECE * n_pieces + DONE
    found = throughput(port, 1, n_pieces, 0)
    assert found["tokens_per_s"] and bool(found["decode_per_s"]) == (n_pieces > 1)
    assert found["decode_per_s"] != 0.0


def test_clients_beside_a_long_prompt_say_why_they_ended(port: int) -> None:
    Answer.body = PIECE * 40  # breaks off
    Answer.long = PIECE * 4 + DONE
    with pytest.raises(RuntimeError, match="without its last line"):
        long_prompt(port, 2, 100, 0)


def test_a_server_that_ends_at_once_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"), served(command, 1, {}):
        pass


# A server that dies at the second request of its first life, and answers all in its second.
MORTAL = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

note, port = Path(sys.argv[1]), int(sys.argv[2])
n_life = int(note.read_text()) + 1 if note.exists() else 1
note.write_text(str(n_life))
asked = threading.Semaphore(1)

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if n_life == 1 and not asked.acquire(blocking=False):
            print("GGML_ASSERT(n < 2) failed", file=sys.stderr, flush=True)
            os._exit(134)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n' * 3 + b"data: [DONE]\\n\\n")

ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def test_a_server_that_dies_is_started_again_for_the_next_measurement(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", MORTAL, str(tmp_path / "lives"), str(port)]
    args = Namespace(clients=[1, 2], tokens=3, turn=100, samples=1, long=False)
    with served(command, port, {}) as server:
        lines = list(measure("llama-server", port, args, server))
    failed, *after = lines
    assert failed["clients"] == 1 and "ended with exit code 134: " in failed["error"]
    assert failed["error"].endswith("GGML_ASSERT(n < 2) failed")
    assert [line["clients"] for line in after] == [2]
    assert after[0]["tokens_per_s"] > 0, "the second life"
