"""The web page's server: what it answers, what it refuses, and that it stops when it is told to."""

import contextlib
import http.client
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import warm_python
from starlette.testclient import TestClient
from training_helpers import make_run, model_config, tiny_run_config
from web_helpers import finish, same_state, serving, tiny_model, tiny_text

from compressive.cli import main
from compressive.data.tokenizer import ByteTokenizer
from compressive.model.language_model import CompressiveLM
from compressive.runs import checkpoint
from compressive.web.engine import Sizes
from compressive.web.guard import is_loopback
from compressive.web.server import STATIC, Limits, Server, Session, listen
from compressive.web.text import SamplingOptions, Text

PROMPT = "It was the best of times, it was the worst of times"
SAMPLING = {"tokens": 40, "temperature": 1.2, "top_p": 0.95, "seed": 7}
HERE = "http://127.0.0.1:8642"


@pytest.fixture
def server():
    return Server(tiny_model(), "tiny", Limits(body=4000, text=1000, tokens=200, texts=3, slots=40, page=100))


@pytest.fixture
def client(server):
    return TestClient(server.app(), base_url=HERE)


def events(answer) -> list[tuple[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", answer.text)
    return [(name, json.loads(data)) for name, data in found]


def done(answer) -> dict[str, Any]:
    name, data = events(answer)[-1]
    assert name == "done", data
    return data


def opened(client, prompt: str = PROMPT) -> dict[str, Any]:
    answer = client.post("/api/texts", json={})
    assert answer.status_code == 201
    assert answer.json()["length"] == 0
    return done(client.post(f"/api/texts/{answer.json()['id']}/edit", json={"at": 0, "text": prompt}))


def tokens(client, number: int) -> list[str]:
    return client.get(f"/api/texts/{number}/tokens?start=0&stop=100").json()["pieces"]


def said(answer, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_the_page_and_its_files_are_served_with_strict_headers(client):
    for path in ("/", "/static/app.js", "/static/style.css", "/api/model", "/api/texts/9"):
        answer = client.get(path)
        assert answer.status_code == (404 if path.endswith("9") else 200)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")


def test_the_page_needs_nothing_from_elsewhere():
    for file in STATIC.iterdir():
        found = re.findall(r"https?://[\w.]+", file.read_text("utf-8"))
        assert set(found) <= {"http://www.w3.org"}, file.name  # SVG's namespace
    page = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"\son\w+=|style=|<style|<script>", page)  # the policy would block them
    for name in re.findall(r"/static/([\w.]+)", page):
        assert (STATIC / name).is_file()


def test_the_model_is_described(client, server):
    about = client.get("/api/model").json()
    assert (about["name"], about["layers"], about["heads"], about["window"]) == ("tiny", 2, 2, 8)
    assert about["sizes"] == {"recent": [12, 12], "compressed": [5, 5]}
    assert about["limits"]["slots"] == 40
    assert about["parameters"] == sum(p.numel() for p in server.model.model.parameters())


def test_a_text_grows_with_events_and_memory(client):
    text = opened(client)
    assert (text["length"], text["title"]) == (51, PROMPT[:40])
    assert text["memory"]["window"] == {"size": 8, "start": 48, "filled": 3}
    heard = events(client.post(f"/api/texts/{text['id']}/continue", json=SAMPLING))
    names = [name for name, _ in heard]
    assert names[0] == "begin"
    assert names[-1] == "done"
    assert {"tokens", "memory"} <= set(names)
    pieces = [piece for name, data in heard if name == "tokens" for piece in data["pieces"]]
    assert len(pieces) == 40
    assert tokens(client, text["id"]) == [*PROMPT, *pieces]
    assert heard[-1][1]["length"] == 91
    shown = client.get("/api/texts").json()
    assert [one["id"] for one in shown] == [text["id"]]


def test_rewinding_is_exact_and_forks_are_independent(client):
    text = opened(client)["id"]
    client.post(f"/api/texts/{text}/continue", json=SAMPLING)
    written = tokens(client, text)
    assert client.post(f"/api/texts/{text}/rewind", json={"at": 70}).json()["length"] == 70
    fork = client.post(f"/api/texts/{text}/fork", json={"at": 60}).json()
    assert (fork["parent"], fork["at"], fork["length"]) == (text, 60, 60)
    client.post(f"/api/texts/{fork['id']}/continue", json=SAMPLING | {"seed": 8})
    assert tokens(client, text) == written[:70]
    client.post(f"/api/texts/{text}/continue", json=SAMPLING | {"tokens": 21})
    assert tokens(client, text) == written
    compared = client.get(f"/api/compare?a={text}&b={fork['id']}").json()
    assert 60 <= compared["common"] < 70
    assert compared["bits"][0] == pytest.approx(compared["bits"][1], abs=1e-3)


def test_an_edit_replaces_the_text_from_a_token_on(client):
    text = opened(client)["id"]
    edited = done(client.post(f"/api/texts/{text}/edit", json={"at": 7, "text": "a dark night"}))
    assert "".join(tokens(client, text)) == "It was a dark night"
    assert edited["length"] == 19
    assert done(client.post(f"/api/texts/{text}/edit", json={"at": 3, "text": ""}))["length"] == 3


@pytest.mark.parametrize("at", [6, 7])
def test_an_edit_within_a_character_replaces_it_whole(client, server, at):
    text = opened(client, "le café")["id"]
    done(client.post(f"/api/texts/{text}/edit", json={"at": at, "text": "és"}))
    assert bytes(server.sessions[text].text.tokens) == "le cafés".encode()


@pytest.mark.parametrize("change", ["edit", "rewind", "fork", "look"])
def test_a_place_is_checked_once_the_text_is_free(client, server, monkeypatch, change):
    """A change that came first may have made the text shorter."""
    text, use = opened(client)["id"], Session.use
    calls = itertools.count()

    async def after_another(session, function):
        if next(calls) == (1 if change == "edit" else 0):  # an edit looks at the text before it waits, too
            await use(session, lambda: session.text.rewind(10))
        return await use(session, function)

    monkeypatch.setattr(Session, "use", after_another)
    if change == "look":
        answer = client.get(f"/api/texts/{text}/look?token=20")
    else:
        answer = client.post(f"/api/texts/{text}/{change}", json={"at": 20, "text": "x"})
    if change == "edit":
        name, data = events(answer)[-1]
        assert (name, data["error"]) == ("error", "at=20: expected 0 to 10")
    else:
        assert "=20: expected 1 to" in said(answer, 400)
    assert len(server.sessions[text].text) == 10


def test_an_edit_after_another_change_is_refused(client, server, monkeypatch):
    text, use = opened(client, "le café")["id"], Session.use
    calls = itertools.count()

    async def after_another(session, function):
        if next(calls) == 1:
            session.text.rewind(3)
            finish(session.text.read(list(b"lait noir")))
        return await use(session, function)

    monkeypatch.setattr(Session, "use", after_another)
    name, data = events(client.post(f"/api/texts/{text}/edit", json={"at": 7, "text": "é"}))[-1]
    assert (name, data["error"]) == ("error", f"at=7: text {text} has changed meanwhile; see where to edit it now")
    assert "".join(server.sessions[text].text.pieces) == "le lait noir"


@pytest.mark.parametrize("again", [False, True])
def test_memory_sizes_change_live(client, server, again):
    text = opened(client)["id"]
    changed = done(client.post(f"/api/texts/{text}/sizes", json={"recent": 6, "compressed": [3, 9], "again": again}))
    assert changed["sizes"] == {"recent": [6, 6], "compressed": [3, 9]}
    expected = tiny_text(PROMPT, memory_size=(6, 6), compressed_size=(3, 9)) if again else tiny_text(PROMPT)
    if not again:
        expected.resize(Sizes((6, 6), (3, 9)))
    assert changed["memory"] == expected.memory()
    assert same_state(server.sessions[text].text, expected)


def test_a_look_has_every_layer_and_head(client):
    text = opened(client)["id"]
    seen = client.get(f"/api/texts/{text}/look?token=50").json()
    assert [len(heads) for heads in seen["layers"]] == [2, 2]
    assert seen["piece"] == PROMPT[50]
    assert "token=51: expected 1 to 50" in said(client.get(f"/api/texts/{text}/look?token=51"), 400)


def test_limits_have_clear_messages(client):
    text = opened(client)["id"]
    path = f"/api/texts/{text}"
    for at, length, status, message in (
        (0, 1001, 400, "1,001 tokens: expected at most 1,000"),
        (51, 950, 400, "1,001 tokens: expected at most 1,000"),
        (0, 5000, 413, "more than 4,000 bytes"),
    ):
        assert message in said(client.post(f"{path}/edit", json={"at": at, "text": "x" * length}), status)
    assert client.get(path).json()["length"] == 51
    assert "tokens=201: expected 1 to 200" in said(client.post(f"{path}/continue", json={"tokens": 201}), 400)
    assert "tokens=1.5: expected a whole" in said(client.post(f"{path}/continue", json={"tokens": 1.5}), 400)
    assert "temperature=-1.0" in said(client.post(f"{path}/continue", json={"tokens": 1, "temperature": -1}), 400)
    assert "top_p='x': expected a number" in said(
        client.post(f"{path}/continue", json={"tokens": 1, "top_p": "x"}), 400
    )
    sizes = {"recent": 41, "compressed": 1}
    assert "recent=41: expected 0 to 40" in said(client.post(f"{path}/sizes", json=sizes), 400)
    assert "expected at least 1 in layer 0" in said(client.post(f"{path}/sizes", json=sizes | {"recent": 0}), 400)
    assert "expected one, or one for each of 2" in said(client.post(f"{path}/sizes", json={"recent": [1]}), 400)
    assert "at=0: expected 1 to 51" in said(client.post(f"{path}/rewind", json={"at": 0}), 400)
    assert "stop=200: expected 0 to 100" in said(client.get(f"{path}/tokens?start=0&stop=200"), 400)
    for temperature, message in (("1" * 401, "expected a smaller number"), ("1e-42", "expected 0 or at least 1e-30")):
        content = f'{{"tokens": 1, "temperature": {temperature}}}'
        assert message in said(client.post(f"{path}/continue", content=content, headers=JSON), 400)
    nested = f'{{"tokens": {"[" * 400}{"]" * 400}}}'
    assert "tokens=[[[" in said(client.post(f"{path}/continue", content=nested, headers=JSON), 400)
    half = client.post(f"{path}/edit", content=b'{"at": 0, "text": "\\ud800"}', headers=JSON)
    assert "half a character" in said(half, 400)
    opened(client)
    opened(client)
    assert "3 texts are open" in said(client.post("/api/texts", json={}), 429)
    assert "3 texts are open" in said(client.post(f"{path}/fork", json={"at": 9}), 429)
    assert client.delete(path).status_code == 204
    assert f"text {text} is not open" in said(client.get(path), 404)
    opened(client)


JSON = {"content-type": "application/json"}


def test_only_json_objects_are_taken(client):
    for given, headers, status in (
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"text=x", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b"[1]", JSON, 400),
        (b"{", JSON, 400),
    ):
        assert "expected" in said(client.post("/api/texts", content=given, headers=headers), status)
    assert client.get("/api/texts").json() == []


def test_deeply_nested_json_is_refused(server):
    server.limits = Limits()
    client = TestClient(server.app(), base_url=HERE)
    nested = b'{"a": ' * 100_000 + b"1" + b"}" * 100_000
    assert "nested too deeply" in said(client.post("/api/texts", content=nested, headers=JSON), 400)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8642", "192.168.0.7:8642", "[", ""])
def test_foreign_hosts_are_refused(client, host):
    assert "expected 127.0.0.1, localhost, ::1" in said(client.get("/api/model", headers={"host": host}), 421)


ORIGINS = ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8642", "http://["]


@pytest.mark.parametrize("origin", ORIGINS)
def test_foreign_origins_are_refused(client, origin):
    answer = client.post("/api/texts", json={}, headers={"origin": origin})
    assert "expected the page of this server" in said(answer, 403)
    assert client.post("/api/texts", json={}, headers={"origin": HERE}).status_code == 201


def test_elsewhere_a_token_is_required(server):
    client = TestClient(server.app("0.0.0.0", "secret"), base_url="http://192.168.0.7:8642", follow_redirects=False)
    assert "whole address" in said(client.get("/"), 401)
    assert "whole address" in said(client.get("/?token=wrong"), 401)
    assert "whole address" in said(client.get("/static/app.js"), 401)
    assert client.get("/api/model", headers={"authorization": "Bearer secret"}).status_code == 200
    assert said(client.get("/?token=secret", headers={"host": "evil.example"}), 421)
    entered = client.get("/?token=secret")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert "SameSite=lax" in entered.headers["set-cookie"]
    assert client.get("/").status_code == 200
    assert client.get("/api/model").status_code == 200


@pytest.mark.parametrize("foreign", ["a@b=1", 'x={"a": 1}', 'y="', "z"])
def test_cookies_of_others_do_not_matter(server, foreign):
    client = TestClient(server.app("0.0.0.0", "secret"), base_url="http://192.168.0.7:8642")
    for cookie in (f"{foreign}; compressive-8642=secret", f"compressive-8642=secret; {foreign}"):
        assert client.get("/api/model", headers={"cookie": cookie}).status_code == 200
    assert said(client.get("/api/model", headers={"cookie": foreign}), 401)


def test_the_address_that_is_printed_is_answered(server, monkeypatch):
    assert TestClient(server.app("127.0.0.2"), base_url="http://127.0.0.2:8642").get("/").status_code == 200
    monkeypatch.setattr("socket.gethostname", lambda: "Desk-7")
    client = TestClient(server.app("0.0.0.0", "secret"), base_url="http://Desk-7:8642")
    for host in ("Desk-7:8642", "desk-7:8642"):
        assert client.get("/?token=secret", headers={"host": host}).status_code == 200


def test_what_only_this_machine_reaches():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "", "192.168.0.7", "example.org"))


def connect(address: str) -> http.client.HTTPConnection:
    where = urlsplit(address)
    return http.client.HTTPConnection(str(where.hostname), where.port, timeout=10)


def ask(address: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Make a request and read the whole answer."""
    connection = connect(address)
    connection.request(method, path, None if body is None else json.dumps(body), JSON)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def begin_text(address: str) -> None:
    """Open the server's first text, with a prompt."""
    assert ask(address, "POST", "/api/texts", {})[0] == 201
    assert ask(address, "POST", "/api/texts/1/edit", {"at": 0, "text": PROMPT})[0] == 200


@contextlib.contextmanager
def writing(address: str, tokens: int) -> Iterator[None]:
    """Let the first text grow, from the first event on, until the request is closed."""
    connection = connect(address)
    connection.request("POST", "/api/texts/1/continue", json.dumps({"tokens": tokens}), JSON)
    answer = connection.getresponse()
    assert answer.readline() == b"event: begin\n"
    yield
    answer.close()
    connection.close()


def settled(text: Text) -> int:
    """The length of a text once it no longer grows."""
    deadline, before = time.monotonic() + 10, -1
    while len(text) != before and time.monotonic() < deadline:
        before = len(text)
        time.sleep(0.25)
    return len(text)


def test_closing_a_request_stops_the_work_and_frees_the_text():
    server = Server(tiny_model(), "tiny", Limits(tokens=1_000_000, text=10_000_000))
    with serving(server) as address:
        begin_text(address)
        with writing(address, 1_000_000):
            assert server.sessions[1].changing.locked()
        text = server.sessions[1].text
        length = settled(text)
        assert len(PROMPT) <= length < 100_000
        _, heard = ask(address, "POST", "/api/texts/1/continue", {"tokens": 3})
        assert b"event: done" in heard
        assert len(text) == length + 3


def test_one_change_at_a_time(monkeypatch):
    """A second change of a text waits for the first, and says so if it waits too long; a look does not wait."""
    monkeypatch.setattr("compressive.web.server.PATIENCE", 0.2)
    server = Server(tiny_model(), "tiny", Limits(tokens=1_000_000, text=10_000_000))
    with serving(server) as address:
        begin_text(address)
        with writing(address, 1_000_000):
            status, refused = ask(address, "POST", "/api/texts/1/rewind", {"at": 3})
            assert status == 409
            assert b"is being written: stop that first" in refused
            assert ask(address, "GET", "/api/texts/1/look?token=20")[0] == 200
            assert ask(address, "DELETE", "/api/texts/1")[0] == 204
        assert ask(address, "GET", "/api/texts/1")[0] == 404


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    made = make_run(folder / "run", tiny_run_config(folder / "data"))
    ByteTokenizer().save(made.folder)
    torch.manual_seed(0)
    checkpoint.save(made.checkpoints, 1, {"model": CompressiveLM(model_config(made.config)).state_dict()}, {})
    return made.folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for other processes")
def test_the_command_prints_its_address_and_stops_at_once_while_it_writes(run):
    command = [*warm_python.interpreter(), "-m", "compressive", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        begin_text(address)
        with writing(address, 10_000):
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert time.monotonic() - began < 3
        assert process.stderr is not None
        assert process.stderr.read().endswith("compressive: interrupted\n")


def test_what_cannot_be_served_is_one_line(run, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 2
        assert f"port {port} of 127.0.0.1 cannot be used (Address already in use): choose another with --port" in (
            capsys.readouterr().err
        )
    for words, message in (
        ([str(tmp_path / "nothing"), "--port", "0"], "is not a run: it holds no config.json"),
        ([str(run), "--host", "not a host", "--port", "0"], "host='not a host': expected an address of this machine"),
        ([str(run), "--port", "99999"], "port=99999: expected 0 to 65535"),
    ):
        assert main(["serve", *words]) == 2
        error = capsys.readouterr().err
        assert message in error


def test_help_offers_what_can_be_served(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert "RUN|RELEASE|NAME" in said
    assert "(default: enwik8-small)" in said


def test_without_the_extra_the_remedy_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", str(run)]) == 2
    assert "pip install 'compressive[web]'" in capsys.readouterr().err


def test_a_free_port_is_found():
    with listen("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0


def test_texts_of_one_engine_may_be_written_at_once(server):
    prompts = (PROMPT[:20], PROMPT[5:30])
    expected, texts = [tiny_text(prompt) for prompt in prompts], [Text(server.engines) for _ in prompts]

    def write(text: Text, prompt: str) -> None:
        finish(text.read(text.encode(prompt)))
        finish(text.write(60, SamplingOptions(seed=3)))

    for text in expected:
        finish(text.write(60, SamplingOptions(seed=3)))
    threads = [threading.Thread(target=write, args=pair) for pair in zip(texts, prompts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
