r"""Serving: a look at a site on this machine.

For the author's eyes: it listens on this machine only, unless told otherwise, answers GET and HEAD, and
gives out files of the site and nothing else. A page that is open reloads when the site has been built anew.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import mimetypes
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["make_server", "watch"]

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".ipynb": "application/json",
}
_RELOAD = """"use strict";
let built = null;
setInterval(async () => {
  try {
    const now = await (await fetch("/_built", { cache: "no-store" })).text();
    if (built !== null && built !== now) location.reload();
    built = now;
  } catch {
    // The server has stopped; the page stays readable.
  }
}, 1000);
"""


class _Handler(BaseHTTPRequestHandler):
    r"""Answers one request; the base class refuses every method that has no `do_` here."""

    server_version = "postil"
    sys_version = ""

    def __init__(self, *args: object, site: Path, hosts: frozenset[str]):
        self.site, self.hosts = site, hosts
        super().__init__(*args)  # pyright: ignore[reportArgumentType]

    def do_GET(self) -> None:
        r"""Send a file."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        r"""Send what GET would, without the file."""
        self._answer(with_body=False)

    # A page of another site could make a browser ask us under a name of its own (DNS rebinding); the name
    # asked for must be one of ours.
    def _answer(self, with_body: bool) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or (self.headers.get("Host") or "")
        if self.hosts and host.strip("[]").lower() not in self.hosts:
            self._send(HTTPStatus.FORBIDDEN, b"unknown host\n", "text/plain", with_body)
            return
        path = urlsplit(self.path).path
        if path == "/_built":
            self._send(HTTPStatus.OK, _stamp(self.site).encode(), "text/plain", with_body)
        elif path == "/_reload.js":
            self._send(HTTPStatus.OK, _RELOAD.encode(), _TYPES[".js"], with_body)
        else:
            self._file(path, with_body)

    def _file(self, path: str, with_body: bool) -> None:
        file = inside(self.site, path)
        if file is None:
            missing = inside(self.site, "/404.html")
            body = missing.read_bytes() if missing else b"not found\n"
            self._send(HTTPStatus.NOT_FOUND, body, _TYPES[".html"] if missing else "text/plain", with_body)
            return
        kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        body = file.read_bytes()
        if file.suffix == ".html":
            body = body.replace(b"</head>", b'<script src="/_reload.js" defer></script>\n</head>', 1)
        self._send(HTTPStatus.OK, body, kind, with_body)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        r"""Say nothing about what was asked; errors are in the answer."""


def inside(site: Path, path: str) -> Path | None:
    r"""The file an address names, or None unless it is a file of the site itself.

    Names that begin with a dot, the build's record, links that lead out, and folders without an index do not
    count as files of the site.
    """
    name = unquote(path)
    parts = [part for part in name.split("/") if part]
    if "\\" in name or "\0" in name or any(part.startswith(".") for part in parts) or parts == ["build.json"]:
        return None
    base = site.resolve()
    file = base.joinpath(*parts)
    if file.is_dir():
        file = file / "index.html"
    resolved = file.resolve()
    return resolved if resolved.is_file() and resolved.is_relative_to(base) else None


def _stamp(site: Path) -> str:
    try:
        state = (site / "build.json").stat()
        return json.dumps([state.st_mtime_ns, state.st_size, state.st_ino])
    except OSError:
        return "none"


def make_server(site: Path, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    r"""A server of a site, bound and not yet running.

    Any address but this machine's own is a decision: it prints a warning.

    Raises:
        FileNotFoundError: `site` is not a folder.
    """
    if not site.is_dir():
        raise FileNotFoundError(f"{site} is not a folder; build the site first")
    local = host == "localhost" or _is_loopback(host)
    if not local:
        print(f"warning: {host} can be reached from other machines", file=sys.stderr)
    hosts = (
        frozenset({"localhost", "127.0.0.1", "::1", host.lower()})
        if host not in ("0.0.0.0", "::")
        else frozenset()
    )
    server = _server_class(host)((host, port), partial(_Handler, site=site, hosts=hosts))
    server.daemon_threads = True
    return server


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    if ":" not in host:
        return ThreadingHTTPServer
    import socket

    return type("_Server6", (ThreadingHTTPServer,), {"address_family": socket.AF_INET6})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def watch(folder: Path, rebuild: Callable[[], None], stop: threading.Event, pause: float = 0.5) -> None:
    r"""Call `rebuild` whenever a source under `folder` has changed, until `stop` is set."""
    before = _state(folder)
    while not stop.wait(pause):
        now = _state(folder)
        if now != before:
            before = now
            rebuild()


def _state(folder: Path) -> dict[str, int]:
    found = {}
    for root, names, files in os.walk(folder if folder.is_dir() else folder.parent):
        names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        for file in files:
            if file.endswith((".py", ".po", ".toml", ".svg", ".css")):
                path = Path(root, file)
                try:
                    found[str(path)] = path.stat().st_mtime_ns
                except OSError:
                    continue
    return found


def serve_forever(server: ThreadingHTTPServer) -> None:
    r"""Run a server until it is interrupted."""
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
