"""The downloader against a local server that can resume, ignore ranges, break off and send wrong data."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from compressive.data import download as module
from compressive.data.download import DownloadError, download

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(HTTPServer):
    plan: SimpleNamespace


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        plan = self.server.plan
        asked = self.headers.get("Range")
        plan.ranges.append(asked)
        plan.agents.append(self.headers.get("User-Agent"))
        if plan.status != 200:
            self.send_error(plan.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and plan.resumes else 0
        if start >= len(plan.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(plan.content)}")
            self.end_headers()
            return
        body = plan.content[start:]
        self.send_response(206 if asked and plan.resumes else 200)
        if asked and plan.resumes:
            first = start + plan.range_shift
            self.send_header("Content-Range", f"bytes {first}-{len(plan.content) - 1}/{len(plan.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: plan.sends.pop(0)] if plan.sends else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.plan = SimpleNamespace(
            content=CONTENT, resumes=True, sends=[], status=200, range_shift=0, ranges=[], agents=[]
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.plan.url = f"http://127.0.0.1:{server.server_port}/corpus.zip"
        yield server.plan
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_file_arrives_whole_and_is_not_fetched_twice(server, tmp_path, capsys):
    path = tmp_path / "deep" / "corpus.zip"
    assert download(server.url, path, SHA256) == path
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["corpus.zip"]
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    download(server.url, path, SHA256)
    assert server.ranges == [None]
    assert not any("urllib" in agent for agent in server.agents)


def test_a_wrong_file_is_replaced_only_by_a_checked_one(server, tmp_path):
    path = tmp_path / "corpus.zip"
    path.write_bytes(b"something else")
    server.status = 404
    with pytest.raises(DownloadError, match="404"):
        download(server.url, path, SHA256)
    assert path.read_bytes() == b"something else"
    server.status = 200
    assert download(server.url, path, SHA256).read_bytes() == CONTENT


def test_an_earlier_part_is_resumed(server, tmp_path):
    (tmp_path / "corpus.zip.part").write_bytes(CONTENT[:1000])
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_without_range_support_the_download_starts_over(server, tmp_path):
    server.resumes = False
    (tmp_path / "corpus.zip.part").write_bytes(b"x" * 1000)
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT


def test_a_complete_part_file_is_only_checked(server, tmp_path):
    (tmp_path / "corpus.zip.part").write_bytes(CONTENT)
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT
    assert len(server.ranges) == 1


def test_a_part_file_that_is_too_long_is_removed(server, tmp_path):
    (tmp_path / "corpus.zip.part").write_bytes(CONTENT + b"more")
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT
    assert server.ranges[1:] == [None]


def test_a_broken_transfer_is_resumed(server, tmp_path):
    server.sends = [5000, 70000]
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=5000-", "bytes=75000-"]


def test_a_transfer_that_keeps_breaking_reports_and_keeps_its_bytes(server, tmp_path):
    server.sends = [10] * module.ATTEMPTS
    with pytest.raises(DownloadError, match=r"50 bytes .* run again to resume"):
        download(server.url, tmp_path / "corpus.zip", SHA256)
    assert not (tmp_path / "corpus.zip").exists()
    assert download(server.url, tmp_path / "corpus.zip", SHA256).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=50-"


def test_a_wrong_range_is_not_appended(server, tmp_path):
    server.range_shift = 7
    (tmp_path / "corpus.zip.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DownloadError, match="asked from 1000"):
        download(server.url, tmp_path / "corpus.zip", SHA256)
    assert (tmp_path / "corpus.zip.part").read_bytes() == CONTENT[:1000]


def test_a_server_error_is_retried(server, tmp_path):
    server.status = 503
    with pytest.raises(DownloadError, match="503"):
        download(server.url, tmp_path / "corpus.zip", SHA256)
    assert len(server.ranges) == module.ATTEMPTS


def test_a_wrong_checksum_is_refused_and_nothing_is_left(server, tmp_path):
    server.content = CONTENT[:-1] + b"!"
    found = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(DownloadError, match=f"{found}.*{SHA256}"):
        download(server.url, tmp_path / "corpus.zip", SHA256)
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_error_says_which_file_to_put_where(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Handler) as gone:
        url = f"http://127.0.0.1:{gone.server_port}/corpus.zip"
    with pytest.raises(DownloadError, match="cannot reach") as caught:
        download(url, tmp_path / "corpus.zip", SHA256)
    for part in (url, str(tmp_path / "corpus.zip"), "--source"):
        assert part in str(caught.value)


def test_a_terminal_shows_a_bar(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    download(server.url, tmp_path / "corpus.zip", SHA256)
    assert "━" in capsys.readouterr().err
