"""A server with the part of the Hugging Face Hub's API that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = "/api/models/"


@dataclass
class Hub:
    """What the server has and what it has been asked for."""

    models: dict[str, Path]
    """The directory of each `org/name`."""
    gated: str = ""
    stalls: str = ""
    """A file that is sent by half, the first time."""
    is_stalling: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""

    def downloaded(self) -> list[tuple[str, str]]:
        """Name and range of each file that was sent."""
        return [
            (path.rpartition("/")[2], span)
            for method, path, span in self.requests
            if method == "GET" and not path.startswith("/api/")
        ]


@contextmanager
def serving_hub(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:  # the name that http.server calls
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        span = self.headers.get("Range", "")
        self.state.requests.append((self.command, path, span))
        if path.startswith(_API):
            org, name, *rest = path.removeprefix(_API).split("/")
            return self._describe(f"{org}/{name}", rest)
        org, name, _, revision, *file = path.lstrip("/").split("/")
        directory = self._directory(f"{org}/{name}", revision)
        if directory is not None:
            self._send_file(directory / "/".join(file), span)

    def _directory(self, model: str, revision: str) -> Path | None:
        if model == self.state.gated:
            self._refuse(403, "GatedRepo")
        elif model not in self.state.models:
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return self.state.models[model]
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _describe(self, model: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        directory = self._directory(model, revision)
        if directory is None:
            return
        files = [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": tag_of(path.read_bytes()),
            }
            for path in sorted(directory.iterdir())
        ]
        whole = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": f["path"]} for f in files]}
        answer = files if rest[:1] == ["tree"] else whole
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: Path, span: str) -> None:
        content = path.read_bytes()
        headers = {
            "ETag": f'"{tag_of(path.read_bytes())}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        if span:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        is_stalled = self.command == "GET" and path.name == self.state.stalls and not span
        self._send(status, content[start:], headers, is_stalled=is_stalled)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, is_stalled: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_stalled:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.state.is_stalling.set()
            self.state.goes_on.wait(60)
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def tag_of(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
