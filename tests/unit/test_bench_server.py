"""scripts/bench_server.py: what it makes of a server's answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_server import Stream, served, throughput

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


def test_a_server_that_ends_at_once_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"), served(command, 1, {}):
        pass
