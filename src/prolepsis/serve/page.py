"""`/`: the web page, whose files are part of the package. What it shows comes from the API that any client has."""

from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = (
    "index.html",
    "base.css",
    "chat.css",
    "engine.css",
    "icon.svg",
    "api.js",
    "blockmap.js",
    "chart.js",
    "chat.js",
    "composer.js",
    "dom.js",
    "engine.js",
    "format.js",
    "key.js",
    "main.js",
    "markdown.js",
    "message.js",
    "sessions.js",
    "settings.js",
    "snapshot.js",
    "sse.js",
    "store.js",
    "theme.js",
)
"""All there is: nothing else in the directory is ever sent."""

# Whatever slipped into the page as markup would find no script that it may run and nowhere to send anything.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    body: bytes
    type: str
    etag: str


@cache
def _read(name: str) -> _File:
    body = files("prolepsis.serve").joinpath("web", name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return _File(body, f"{kind}; charset=utf-8", f'"{blake2b(body, digest_size=12).hexdigest()}"')


def _answer(name: str, request: Request) -> Response:
    file = _read(name)
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.type)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page. It is sent whole to whoever asks, and asks for a key itself where the API wants one."""
    return _answer("index.html", request)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def file(name: str, request: Request) -> Response:
    """One of its files."""
    if name not in FILES:
        raise HTTPException(404, "the page has no such file")
    return _answer(name, request)
