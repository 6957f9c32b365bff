"""A small hub on a local port: the part of Hugging Face's HTTP interface that downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlparse

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Repositories, and what goes wrong.

    files: by "OWNER/REPO", the bytes of each file. token: who does not send it gets 401. gated:
    who sends it gets 403. cuts: after how many bytes the next downloads break off, one for each.
    told: checksums that the hub tells instead of the right ones, by file. ranges: of all
    downloads, the header Range that was sent. seen: all requests, as "METHOD path".
    """

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: bool = False
    cuts: list[int] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    ranges: list[str | None] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    commit: str = COMMIT

    def __enter__(self) -> FakeHub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def etag(self, repo: str, file: str) -> str:
        return self.told.get(file) or hashlib.sha256(self.files[repo][file]).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlparse(self.path).path
        self.hub.seen.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_list = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_list else parts[:2])
        if not self._may(repo):
            return
        if is_list:
            self._list(repo, "blobs=" in self.path)
        else:
            self._file(repo, parts[3], "/".join(parts[4:]))

    def _may(self, repo: str) -> bool:
        """Answer with an error as the hub does, unless the repository is there for this client."""
        sent = self.headers.get("Authorization")
        if self.hub.token is not None and sent is not None and sent != f"Bearer {self.hub.token}":
            message = "Invalid credentials in Authorization header"
            self._send(401, b"{}", {"X-Error-Message": message})
        elif repo not in self.hub.files or (self.hub.token is not None and sent is None):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            return True
        return False

    def _list(self, repo: str, has_sizes: bool) -> None:
        files: list[dict[str, object]] = [
            {"rfilename": name, **({"size": len(data)} if has_sizes else {})}
            for name, data in self.hub.files[repo].items()
        ]
        body = json.dumps({"id": repo, "siblings": files}).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        data = self.hub.files[repo].get(name)
        if data is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "X-Repo-Commit": self.hub.commit if revision == "main" else revision,
            "ETag": f'"{self.hub.etag(repo, name)}"',
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        status, start = 200, 0
        if wanted is not None:
            start, status = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.ranges.append(wanted)
        self._send(status, data[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = (
            self.hub.cuts.pop(0)
            if self.hub.cuts and status in (200, 206) and _is_file(self)
            else None
        )
        self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None


def _is_file(request: BaseHTTPRequestHandler) -> bool:
    return "/resolve/" in request.path
