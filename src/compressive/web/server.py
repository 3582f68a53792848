"""The web page's server: texts behind a small JSON interface, long work as a stream of events, and the page's files.

Every answer to a long request is a stream of server-sent events: `progress`, `tokens`, `memory`, then `done` or
`error`. Closing the request stops the work. Each text has two locks: `changing` for a whole change (one at a time),
`using` for the short stretches in which a thread computes, so that a text can be looked into while it grows.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any, TypeVar

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from compressive import __version__
from compressive.api import TextModel
from compressive.inference.sampling import check_sampling
from compressive.web.engine import Engines, Sizes
from compressive.web.guard import LOCAL, Guard, is_loopback, refuse
from compressive.web.text import SamplingOptions, Text

STATIC = Path(__file__).parent / "static"
STRETCH = 0.04
"""Seconds that a thread computes before what it has is sent."""
PATIENCE = 5.0
"""Seconds that a change waits for the one before it, which may just have been stopped."""
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one server takes at most."""

    body: int = 8 << 20  # bytes of a request
    text: int = 1_000_000  # tokens of a text, its prompt included
    tokens: int = 10_000  # tokens that one request samples
    texts: int = 16  # open at a time
    slots: int = 4096  # of each memory in each layer; more if the model was trained with more
    page: int = 4096  # tokens that one request is given


@dataclass
class Session:
    """One open text."""

    id: int
    text: Text
    parent: int | None = None  # the text that it was forked from,
    at: int | None = None  # after so many tokens
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    using: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def use(self, function: Callable[[], T]) -> T:
        """Call a function in a thread, while nobody else uses the text."""
        async with self.using:
            return await anyio.to_thread.run_sync(function)

    def summary(self) -> dict[str, Any]:
        """Return what the page shows of a text besides its tokens."""
        text = self.text
        return {
            "id": self.id,
            "parent": self.parent,
            "at": self.at,
            "title": "".join(text.pieces[:60]).strip()[:40],
            "length": len(text),
            "given": text.given,
            "bits": _mean(text.bits),
            "sizes": {"recent": text.sizes.recent, "compressed": text.sizes.compressed},
            "memory": text.memory() if len(text) else None,
        }


class Server:
    """The texts of one model, and the answers to all requests."""

    def __init__(self, model: TextModel, name: str, limits: Limits | None = None) -> None:
        self.model, self.name, self.limits = model, name, limits or Limits()
        self.engines = Engines(model)
        self.sessions: dict[int, Session] = {}
        self.numbers = itertools.count(1)
        self.stopping = False

    def app(self, host: str = "127.0.0.1", token: str | None = None) -> Guard:
        """Return the ASGI application, guarded for a server that listens on `host`."""
        routes = [
            Route("/", self.page),
            Route("/api/model", self.describe),
            Route("/api/texts", self.texts),
            Route("/api/texts", self.create, methods=["POST"]),
            Route("/api/compare", self.compare),
            Route("/api/texts/{id:int}", self.show),
            Route("/api/texts/{id:int}", self.close, methods=["DELETE"]),
            Route("/api/texts/{id:int}/tokens", self.tokens),
            Route("/api/texts/{id:int}/look", self.look),
            Route("/api/texts/{id:int}/continue", self.go_on, methods=["POST"]),
            Route("/api/texts/{id:int}/fork", self.fork, methods=["POST"]),
            Route("/api/texts/{id:int}/rewind", self.rewind, methods=["POST"]),
            Route("/api/texts/{id:int}/edit", self.edit, methods=["POST"]),
            Route("/api/texts/{id:int}/sizes", self.resize, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _said, ValueError: _wrong})
        everywhere = host in ("0.0.0.0", "::", "")
        names = (host, *LOCAL, *((socket.gethostname(), socket.getfqdn()) if token else ()))
        return Guard(app, tuple(dict.fromkeys(filter(None, names))), everywhere, token)

    # What a page asks for.

    async def page(self, _: Request) -> Response:
        """The page itself."""
        return FileResponse(STATIC / "index.html")

    async def describe(self, _: Request) -> Response:
        """The model, and what the page has to know of the server."""
        config = self.engines.default.config
        return JSONResponse(
            {
                "name": self.name,
                "version": __version__,
                "parameters": sum(parameter.numel() for parameter in self.model.model.parameters()),
                "tokenizer": self.model.tokenizer.kind,
                "step": self.model.step,
                "device": str(self.engines.default.device),
                "layers": config.n_layers,
                "heads": config.n_heads,
                "window": config.window,
                "rates": config.compression_rates,
                "compression": config.compression,
                "sizes": {"recent": config.memory_sizes, "compressed": config.compressed_sizes},
                "limits": asdict(self.limits) | {"slots": self._most_slots()},
            }
        )

    async def texts(self, _: Request) -> Response:
        """All open texts."""
        return JSONResponse([await session.use(session.summary) for session in list(self.sessions.values())])

    async def show(self, request: Request) -> Response:
        """One text. A change that was just stopped ends first; one that goes on is not waited for."""
        session = self._session(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), session.changing:
                return JSONResponse(await session.use(session.summary))
        return JSONResponse(await session.use(session.summary))

    async def tokens(self, request: Request) -> Response:
        """Some tokens of a text: what each adds to it, and its surprise in bits."""
        session = self._session(request)
        length = len(session.text)
        start = _number(request.query_params, "start", 0, length)
        stop = _number(request.query_params, "stop", start, start + self.limits.page)
        return JSONResponse(await session.use(lambda: _tokens(session.text, start, stop)))

    async def look(self, request: Request) -> Response:
        """Where each head looked when a token was predicted."""
        session = self._session(request)

        def looked() -> dict[str, Any]:
            return session.text.look(_number(request.query_params, "token", 1, len(session.text) - 1))

        return JSONResponse(await session.use(looked))

    async def compare(self, request: Request) -> Response:
        """How many tokens two texts have in common, and the surprise of each over these, in bits per token."""
        a, b = (self._find(_number(request.query_params, name, 0, 1 << 31)).text for name in "ab")
        return JSONResponse(await anyio.to_thread.run_sync(lambda: _compared(a, b)))

    # Changes.

    async def create(self, request: Request) -> Response:
        """Open an empty text; `edit` gives it a prompt."""
        await self._body(request)
        session = self._open(Text(self.engines))
        return JSONResponse(session.summary(), 201)

    async def go_on(self, request: Request) -> Response:
        """Sample tokens."""
        session, body = self._session(request), await self._body(request)
        count = _number(body, "tokens", 1, self.limits.tokens)
        options = SamplingOptions(
            _real(body, "temperature", 1.0), _real(body, "top_p", 0.98), _number(body, "top_k", 0, 1 << 31, 0),
            _number(body, "seed", 0, (1 << 53) - 1, 0),
        )  # fmt: skip
        check_sampling(options.temperature, options.top_p, options.top_k)
        if len(session.text) == 0:
            raise ValueError("the text is empty: expected a token to go on from; give it a prompt")
        if len(session.text) + count > self.limits.text:
            raise ValueError(self._too_long(len(session.text) + count))
        return self._stream(session, lambda: session.text.write(count, options), total=count, live=True)

    async def edit(self, request: Request) -> Response:
        """Replace the text from a token on."""
        session, body = self._session(request), await self._body(request)

        def place() -> tuple[int, int, str]:
            at = _number(body, "at", 0, len(session.text))
            return at, *session.text.whole(at)

        at, begin, kept = await session.use(place)
        new = await self._encoded(session.text, body, begin, kept)

        def edited() -> Iterator[int]:
            if place() != (at, begin, kept):  # after another change, which this one waited for
                raise ValueError(f"at={at}: text {session.id} has changed meanwhile; see where to edit it now")
            session.text.rewind(begin)
            yield from session.text.read(new)

        return self._stream(session, edited, total=len(new))

    async def resize(self, request: Request) -> Response:
        """Change memory sizes: from the current window on, or (`again`) for the whole text, which is read again."""
        session, body = self._session(request), await self._body(request)
        sizes = Sizes(self._sizes(body, "recent"), self._sizes(body, "compressed"))
        self.engines.of(sizes)
        if body.get("again"):
            return self._stream(session, lambda: session.text.read_again(sizes), total=len(session.text))

        def resized() -> Iterator[int]:
            session.text.resize(sizes)
            yield len(session.text)

        return self._stream(session, resized, total=len(session.text))

    async def rewind(self, request: Request) -> Response:
        """Forget all but the first tokens."""
        session, body = self._session(request), await self._body(request)

        def rewound() -> dict[str, Any]:
            session.text.rewind(_number(body, "at", 1, len(session.text)))
            return session.summary()

        async with _one_change(session):
            return JSONResponse(await session.use(rewound))

    async def fork(self, request: Request) -> Response:
        """Open a text of the first tokens of another."""
        session, body = self._session(request), await self._body(request)
        self._check_texts()
        text = await session.use(lambda: session.text.fork(_number(body, "at", 1, len(session.text))))
        forked = self._open(text, session.id, len(text))
        return JSONResponse(await forked.use(forked.summary))

    async def close(self, request: Request) -> Response:
        """Close a text; what it was doing stops."""
        del self.sessions[self._session(request).id]
        return Response(status_code=204)

    # How it works.

    def _stream(
        self, session: Session, work: Callable[[], Iterator[int]], total: int, live: bool = False
    ) -> StreamingResponse:
        """Do long work stretch by stretch, in threads; `live` sends tokens as they come, else only progress."""

        async def events() -> AsyncIterator[str]:
            try:
                async with _one_change(session):
                    yield _event("begin", {"id": session.id, "total": total})
                    steps, text = work(), session.text
                    sent, window = len(text), -1
                    while not self.stopping and session.id in self.sessions:
                        done, over = await session.use(lambda: _advance(steps))
                        if live:
                            yield _event("tokens", _tokens(text, sent, len(text)))
                            sent = len(text)
                        elif done is not None:
                            yield _event("progress", {"done": done, "total": total})
                        if len(text) // text.window != window:
                            window = len(text) // text.window
                            yield _event("memory", await session.use(text.memory))
                        if over:
                            break
                    yield _event("done", await session.use(session.summary))
            except (ValueError, HTTPException) as error:
                yield _event("error", {"error": getattr(error, "detail", str(error))})

        return StreamingResponse(events(), media_type="text/event-stream")

    def _open(self, text: Text, parent: int | None = None, at: int | None = None) -> Session:
        self._check_texts()
        session = Session(next(self.numbers), text, parent, at)
        self.sessions[session.id] = session
        return session

    def _check_texts(self) -> None:
        if len(self.sessions) >= self.limits.texts:
            raise HTTPException(429, f"{self.limits.texts} texts are open, as many as may be: close one first")

    def _session(self, request: Request) -> Session:
        return self._find(request.path_params["id"])

    def _find(self, number: int) -> Session:
        if number not in self.sessions:
            raise HTTPException(404, f"text {number} is not open: it was closed, or the server was restarted")
        return self.sessions[number]

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read a JSON object, but never more than the limit."""
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise HTTPException(415, "expected a body of type application/json")
        most, body = self.limits.body, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise HTTPException(413, f"a request of more than {most:,} bytes: expected less; give a shorter text")
        try:
            found = json.loads(body)
        except ValueError:
            raise HTTPException(400, "the body is not JSON: expected an object") from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply: expected an object of plain values") from None
        if not isinstance(found, dict):
            raise HTTPException(400, f"a body of type {type(found).__name__}: expected an object")
        return found

    async def _encoded(self, text: Text, body: dict[str, Any], before: int, kept: str) -> list[int]:
        """The tokens of `kept` and the text in a body, which follow `before` others."""
        given = body.get("text")
        if not isinstance(given, str):
            raise ValueError(f"text of type {type(given).__name__}: expected a string")
        new = kept + given
        if new == "" and before > 0:
            return []
        try:
            tokens = await anyio.to_thread.run_sync(lambda: text.encode(new))
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
            raise ValueError("text holds half a character: expected what UTF-8 can hold") from None
        if before + len(tokens) > self.limits.text:
            raise ValueError(self._too_long(before + len(tokens)))
        return tokens

    def _too_long(self, tokens: int) -> str:
        return f"a text of {tokens:,} tokens: expected at most {self.limits.text:,}; give a shorter one"

    def _most_slots(self) -> int:
        return max(self.limits.slots, *self.engines.default.sizes.recent, *self.engines.default.sizes.compressed)

    def _sizes(self, body: dict[str, Any], name: str) -> tuple[int, ...]:
        """One memory's slots: a number for all layers, or a list with one for each."""
        layers, given = self.engines.default.config.n_layers, body.get(name)
        sizes = given if isinstance(given, list) else [given] * layers
        if len(sizes) != layers:
            raise ValueError(f"{name} of {len(sizes)} numbers: expected one, or one for each of {layers} layers")
        return tuple(_number({name: size}, name, 0, self._most_slots()) for size in sizes)


def _advance(steps: Iterator[int]) -> tuple[int | None, bool]:
    """Let work go on for a stretch of time; return what it yielded last, and whether it is over."""
    done, end = None, time.monotonic() + STRETCH
    for done in steps:
        if time.monotonic() > end:
            return done, False
    return done, True


@contextlib.asynccontextmanager
async def _one_change(session: Session) -> AsyncIterator[None]:
    """Wait until nothing else changes the text."""
    try:
        async with asyncio.timeout(PATIENCE):
            await session.changing.acquire()
    except TimeoutError:
        raise HTTPException(409, f"text {session.id} is being written: stop that first") from None
    try:
        yield
    finally:
        session.changing.release()


def _tokens(text: Text, start: int, stop: int) -> dict[str, Any]:
    bits = [None if bits is None else round(bits, 2) for bits in text.bits[start:stop]]
    return {"start": start, "pieces": text.pieces[start:stop], "bits": bits}


def _compared(a: Text, b: Text) -> dict[str, Any]:
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    common = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    return {"common": common, "bits": [_mean(text.bits[:common]) for text in (a, b)]}


def _mean(bits: list[float | None]) -> float | None:
    """The mean surprise of tokens that something precedes."""
    known = [x for x in bits if x is not None]
    return sum(known) / len(known) if known else None


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _number(values: Any, name: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number of a query or a body. Raises ValueError if it is none or outside of low to high."""
    given = values.get(name, default)
    try:
        if isinstance(given, bool | float):
            raise ValueError
        number = int(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={brief(given)}: expected a whole number") from None
    if not low <= number <= high:
        raise ValueError(f"{name}={number}: expected {low:,} to {high:,}")
    return number


def _real(values: dict[str, Any], name: str, default: float) -> float:
    given = values.get(name, default)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError(f"{name}={brief(given)}: expected a number")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(f"{name}={brief(given)}: expected a smaller number") from None


async def _said(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refuse(error.status_code, error.detail)


async def _wrong(_: Request, error: Exception) -> Response:
    return refuse(400, str(error))


class StoppableServer(uvicorn.Server):
    """A server that says when it listens, and that ends streams at once when it is to stop."""

    def __init__(self, config: uvicorn.Config, server: Server, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._texts, self._listening = server, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._listening()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop after a signal."""
        self._texts.stopping = True
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Take a port before anything slow is done. Raises ValueError, naming a remedy, if that cannot be."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port={port}: expected 0 to 65535; 0 takes any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host={host!r}: expected an address of this machine ({error.strerror})") from None
    if os.name == "posix":  # elsewhere this lets two servers share a port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        raise ValueError(
            f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port, or --port 0 for any "
            "that is free"
        ) from None
    return bound


def serve(
    model: TextModel, name: str, bound: socket.socket, host: str, listening: Callable[[str], None] = lambda _: None
) -> None:
    """Serve the page on a socket that `listen` gave, until Ctrl-C; calls `listening` with the address to open.

    A server that other machines can reach requires a token, which the address has.
    """
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    shown = {"": socket.gethostname(), "0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{bound.getsockname()[1]}/"
    if token:
        address += f"?token={token}"
    server = Server(model, name)
    config = uvicorn.Config(
        server.app(host, token), log_level="warning", access_log=False, server_header=False, ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    StoppableServer(config, server, lambda: listening(address)).run(sockets=[bound])
