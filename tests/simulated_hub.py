"""A SIMULATED model hub for tests: the two calls that Peerlane uses, over one folder, with faults on request.

    python3 simulated_hub.py FOLDER REPOSITORY PORT [--cut-after BYTES] [--token TOKEN] [--no-ranges] [--redirect]

``--cut-after`` ends the connection in the middle of each file answer that would be longer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".gguf", ".safetensors")


class SimulatedHub(ThreadingHTTPServer):
    """The server, with what it was asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, repository: str, port: int = 0) -> None:
        self.folder = folder
        self.repository = repository
        self.cut_after = 0
        self.token = ""
        self.ranges = True
        self.redirect = False
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.wrong_bytes = ""
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> SimulatedHub:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def listing(self) -> dict[str, object]:
        """Return the answer about the repository."""
        rows = []
        for path in sorted(self.folder.rglob("*")):
            if not path.is_file():
                continue
            raw = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
            row: dict[str, object] = {"rfilename": str(path.relative_to(self.folder)), "size": len(raw), "blobId": blob}
            if path.suffix in LARGE:
                row["lfs"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 134}
            rows.append(row)
        return {"id": self.repository, "sha": COMMIT, "siblings": rows}


class _Handler(BaseHTTPRequestHandler):
    server: SimulatedHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        hub = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.asked.append((path, {name.lower(): value for name, value in self.headers.items()}))
        if hub.token and not path.startswith("/cdn/") and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, b"{}")
            return
        if path.startswith(f"/api/models/{hub.repository}/revision/"):
            self._answer(200, json.dumps(hub.listing()).encode())
            return
        start = f"/{hub.repository}/resolve/{COMMIT}/"
        name = path.removeprefix(start).removeprefix("/cdn/")
        if name == path or not (hub.folder / name).is_file():
            self._answer(404, b"{}")
        elif hub.redirect and path.startswith(start):
            self.send_response(302)
            # Another name for this machine: for a client it is another host.
            self.send_header("Location", f"http://localhost:{hub.server_address[1]}/cdn/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._file(hub.folder / name)

    def _file(self, path: Path) -> None:
        raw = path.read_bytes()
        if self.server.wrong_bytes == path.name:
            raw = bytes(reversed(raw))
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and self.server.ranges else 0
        body = raw[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        limit = self.server.cut_after
        if limit and len(body) > limit:
            self.wfile.write(body[:limit])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A simulated model hub, for tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("repository")
    parser.add_argument("port", type=int)
    parser.add_argument("--cut-after", type=int, default=0)
    options = parser.parse_args()
    hub = SimulatedHub(options.folder, options.repository, options.port)
    hub.cut_after = options.cut_after
    hub.serve_forever()


if __name__ == "__main__":
    main()
