"""A model hub on loopback: the part of its protocol that downloading one model needs.

    with FakeHub({"org/name": {"config.json": b"{}", "model.safetensors": b"..."}}) as hub:
        subprocess.run(..., env={"HF_ENDPOINT": hub.url})

It counts what it sends, checks tokens, and can be slow, closed, or full of errors.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CHUNK = 64 * 1024


class FakeHub:
    """`models`: id -> file name -> content. `gated` need the token `secret`. `bytes_per_s` slows
    down every file; `claimed` are sizes that the hub says a file has; `fail_with` is a status that
    every request gets."""

    def __init__(
        self,
        models: Mapping[str, Mapping[str, bytes]],
        *,
        gated: frozenset[str] = frozenset(),
        bytes_per_s: float = float("inf"),
        claimed: Mapping[str, int] | None = None,
    ) -> None:
        self.models, self.gated, self.bytes_per_s = models, gated, bytes_per_s
        self.claimed = dict(claimed or {})
        self.fail_with: int | None = None
        self.sent: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
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


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.owner
        token = self.headers.get("Authorization")
        hub.tokens.add(token)
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        model = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        if hub.fail_with:
            self._error(hub.fail_with, "")
        elif model not in hub.models:
            self._error(404, "RepoNotFound")
        elif model in hub.gated and token != "Bearer secret":
            self._error(403 if token else 401, "GatedRepo")
        elif parts[0] == "api":
            self._json(parts[4], hub.models[model], model)
        else:
            self._file("/".join(parts[4:]), hub.models[model], body=body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, kind: str, files: Mapping[str, bytes], model: str) -> None:
        sizes = {name: len(content) for name, content in files.items()} | self.owner.claimed
        entries = [
            {"type": "file", "path": name, "oid": _etag(content), "size": sizes[name]}
            for name, content in files.items()
        ]
        siblings = [
            {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
            for entry in entries
        ]
        info = {"_id": "1", "id": model, "sha": COMMIT, "siblings": siblings}
        text = json.dumps(entries if kind == "tree" else info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _file(self, name: str, files: Mapping[str, bytes], *, body: bool) -> None:
        if name not in files:
            self._error(404, "EntryNotFound")
            return
        content = files[name]
        self.send_response(200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for begin in range(0, len(content) if body else 0, _CHUNK):
            chunk = content[begin : begin + _CHUNK]
            try:
                self.wfile.write(chunk)
            except OSError:  # whoever asked is gone
                return
            self.owner.sent[name] += len(chunk)
            time.sleep(len(chunk) / self.owner.bytes_per_s)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what fails."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
