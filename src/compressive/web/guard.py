"""Who may talk to the server: an ASGI middleware in front of everything else.

A page of another site that the user has open can send requests to this machine. It cannot forge the headers `Host` and
`Origin`, and it cannot send JSON without permission, which is never given.
"""

import hmac
import ipaddress
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""On every answer."""
LOCAL = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses foreign hosts and origins, and requests without the token where there is one.

    `hosts` are the names and addresses by which the server may be called, whatever the port: a tunnel may have another.
    A name that somebody points at this machine (DNS rebinding) is not among them. `any_address` allows every numeric
    address too, for a server that listens on all of them.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], any_address: bool = False, token: str | None = None):
        self.app, self.any_address, self.token = app, any_address, token
        self.hosts = tuple(host.lower() for host in hosts)  # as urlsplit gives them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse or pass on."""
        if scope["type"] != "http":  # the lifespan; there are no websockets
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._refusal(scope) or self.app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._known(host):
            return refuse(421, f"host={host!r}: expected {', '.join(self.hosts)}; open the address that was printed")
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            return refuse(403, f"origin={origin!r}: expected the page of this server, {host}")
        if self.token is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        cookie = f"compressive-{scope['server'][1] if scope.get('server') else 0}"
        if given and self._fits(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="lax")  # strict: not sent after a link elsewhere
            return answer
        kept = cookie_parser(headers.get("cookie", "")).get(cookie, "")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(bearer) or self._fits(kept):
            return None
        return refuse(401, "the token is missing or wrong: open the whole address that compressive serve printed")

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            return self.any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _fits(self, given: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(given.encode(), self.token.encode())


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def refuse(status: int, message: str) -> JSONResponse:
    """An answer that says in one line what was wrong and what would do."""
    return JSONResponse({"error": message}, status)
