# ruff: noqa: E501  (payloads and programs in strings are read whole)
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from postil.pages.serving import inside, make_server, watch


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    (folder / "sub").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "index.html").write_text("<head></head>home")
    (folder / "sub/index.html").write_text("sub")
    (folder / ".hidden").write_text("secret")
    (folder / "build.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path)
    return folder


@pytest.fixture
def server(site):
    server = make_server(site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def ask(server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    """One raw request: no client tidies the path."""
    with socket.create_connection(server.server_address[:2], timeout=5) as connection:
        name = host or f"127.0.0.1:{server.server_address[1]}"
        connection.sendall(f"{method} {path} HTTP/1.0\r\nHost: {name}\r\n\r\n".encode("latin-1"))
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.read().decode(), {k.lower(): v for k, v in response.getheaders()}


def test_pages_are_served(server):
    status, body, headers = ask(server, "/")
    assert status == 200 and "home" in body and "_reload.js" in body
    assert headers["content-security-policy"] == "default-src 'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert ask(server, "/sub/")[:2] == (200, "sub")
    assert ask(server, "/index.html", "HEAD")[:2] == (200, "")


@pytest.mark.case("BC134")
@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/sub/../../secret.txt", "/..%2fsecret.txt", "/%2e%2e%2fsecret.txt", "//secret.txt", "/link.txt",
     "/up/secret.txt", "/.hidden", "/%2ehidden", "/build.json", "/..\\secret.txt", "/secret.txt%00.html", "/empty/", "/empty", "/etc/passwd",
     "http://127.0.0.1/../secret.txt", "/....//secret.txt", "/%252e%252e/secret.txt", "/sub/%c0%ae%c0%ae/secret.txt"],
)  # fmt: skip
def test_nothing_else_is_served(server, path):
    status, body, _ = ask(server, path)
    assert status == 404 and "secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_only_reading_is_allowed(server, method):
    assert ask(server, "/", method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_another_name_is_refused(server, host):
    assert ask(server, "/", host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1"])
def test_our_names_are_accepted(server, host):
    assert ask(server, "/", host=host)[0] == 200


def listening(pid: int) -> set[str]:
    """Local addresses on which a process listens, from the kernel's own table."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.case("BC135")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_the_viewer_listens_on_this_machine_only(site):
    command = [sys.executable, "-m", "postil.pages", "serve", str(site), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert listening(process.pid) == {"0100007F"}
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert "warning" not in errors


@pytest.mark.case("BC135")
def test_another_address_is_a_decision_and_warns(site, capsys):
    make_server(site, "0.0.0.0").server_close()
    assert "can be reached from other machines" in capsys.readouterr().err
    make_server(site, "localhost").server_close()
    assert capsys.readouterr().err == ""


def test_a_page_reloads_after_a_build(server, site):
    before = ask(server, "/_built")[1]
    assert before == ask(server, "/_built")[1]
    time.sleep(0.01)
    (site / "build.json").write_text('{"new": 1}')
    assert ask(server, "/_built")[1] != before


def test_a_changed_source_is_built_again(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    stop, built = threading.Event(), threading.Event()
    thread = threading.Thread(target=watch, args=(tmp_path, built.set, stop, 0.02))
    thread.start()
    time.sleep(0.1)
    assert not built.is_set()
    (tmp_path / "one.py").write_text("x = 2\n")
    os.utime(tmp_path / "one.py", ns=(1, 1))
    assert built.wait(10)
    stop.set()
    thread.join(10)


def test_a_missing_site_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="build the site first"):
        make_server(tmp_path / "gone")


def test_inside_never_leaves(site):
    assert inside(site, "/sub") == (site / "sub/index.html").resolve()
    assert inside(site, "/up/site/index.html") is None or inside(site, "/up/site/index.html").is_relative_to(
        site.resolve()
    )
