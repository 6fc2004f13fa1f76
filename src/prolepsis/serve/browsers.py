"""What keeps web pages of others from using a server through their visitors' browsers."""

from collections.abc import Collection, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prolepsis.serve.asgi import header, refuse
from prolepsis.serve.errors import APIError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class HostCheck:
    """Refuses requests to a name that is not the server's, and those that another site's page makes a browser send.

    The first: a page may have its own name resolve to 127.0.0.1 once it is loaded (DNS rebinding), and then counts as
    of the same origin. The second: a browser sends simple POSTs anywhere, though it hides the answers.
    """

    def __init__(self, app: ASGIApp, bound_to: str, allowed_hosts: Collection[str], origins: Collection[str]) -> None:
        """`allowed_hosts`: names besides those of the loopback; they are checked where the server is bound to that, or
        any is given. `origins`: those CORS allows."""
        self._app = app
        self._allowed = {host.lower() for host in allowed_hosts}
        self._names = {*self._allowed, *_LOOPBACK_NAMES}
        self._checks_names = bool(allowed_hosts) or is_loopback(bound_to)
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._complaint(scope) if scope["type"] == "http" else None
        if why is None:
            await self._app(scope, receive, send)
        else:
            await refuse(APIError(403, why, code="host_not_allowed"), scope, receive, send)

    def _complaint(self, scope: Scope) -> str | None:
        host, origin = header(scope, b"host"), header(scope, b"origin")
        if self._checks_names and host is not None and _name(host) not in self._names:
            return "the Host header names another server than this; allow its name with --allowed-host"
        if origin is None or scope["method"] in _SAFE_METHODS or "*" in self._origins or origin in self._origins:
            return None
        if _authority(origin) == host or _name(_authority(origin)) in self._allowed:
            return None
        return (
            "a page of another origin may not send this; allow it with --cors-origin, or --allowed-host behind a proxy"
        )


def _name(authority: str) -> str:
    """The host name or address of `host:port` or `[address]:port`, in lower case; empty where there is none."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class SecurityHeaders:
    """Adds to every answer what has browsers treat it with care, unless the endpoint has set the header itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, for pages of `origins` too; as it is where there are none."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["retry-after"],
        max_age=600,
    )
