"""A hub on this machine: one repository, as much of the HTTP interface as a download needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """`files`: name → bytes. `broken`: a name whose download breaks off half way, once. `held`: files wait until it is set. `asked`: every
    request."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository = repository
        self.files = files
        self.broken = ""
        self.gated = False
        self.held = threading.Event()
        self.held.set()
        self.asked: list[str] = []
        self.url = ""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return None

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if hub.gated:
                self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, body)
            elif re.fullmatch(rf"/api/models/{hub.repository}(/revision/(main|{COMMIT}))?", path):
                self.reply(200, json.dumps(self.card()).encode(), {"Content-Type": "application/json"}, body)
            elif path == f"/api/models/{hub.repository}/tree/{COMMIT}":
                self.reply(200, json.dumps(self.tree()).encode(), {"Content-Type": "application/json"}, body)
            elif path.startswith(f"/api/models/{hub.repository}/revision/"):
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            elif found := re.fullmatch(rf"/{hub.repository}/resolve/(?:main|{COMMIT})/(.+)", path):
                self.file(found[1], body)
            else:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

        def card(self) -> dict[str, object]:
            siblings = [{"rfilename": name, "size": len(data), "blobId": etag(data)} for name, data in hub.files.items()]
            return {"id": hub.repository, "modelId": hub.repository, "sha": COMMIT, "private": False, "siblings": siblings}

        def tree(self) -> list[dict[str, object]]:
            return [{"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in hub.files.items()]

        def file(self, name: str, body: bool) -> None:
            hub.held.wait()
            data = hub.files[name]
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if body and name == hub.broken:
                hub.broken = ""
                self.reply(206 if start else 200, data[start:], headers, body, cut=True)
            else:
                self.reply(206 if start else 200, data[start:], headers, body)

        def reply(self, status: int, data: bytes, headers: dict[str, str], body: bool, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

    return Handler


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        thread.join()
        server.server_close()
