"""Whatever goes wrong, as OpenAI's error object."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from prolepsis.errors import ContextLengthError, InputError, ProlepsisError

_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(ProlepsisError):
    """An answer with a status of its own. Clients try 409, 429 and 5xx again, so what is wrong with a request has none
    of these."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        param: the field of the body that is at fault.
        code: a word that programs can tell the error by.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for errors of this status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The error object."""
        param = None if self.param is None else _encodable(self.param)
        return {"error": {"message": _encodable(str(self)), "type": self.type, "param": param, "code": self.code}}

    def response(self) -> Response:
        """The error object as an answer."""
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def retry_after(seconds: int) -> dict[str, str]:
    """The header that says when to ask again."""
    return {"Retry-After": str(seconds)}


def _encodable(text: str) -> str:
    """A text without unpaired surrogates, which JSON lets in and UTF-8 does not let out."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: BaseException) -> APIError:
    """What a client is told of an error. Of one that nobody foresaw, only that there was one."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InputError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return APIError(400, str(error), param=error.field, code=code)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, ProlepsisError):
        return APIError(500, str(error))
    return APIError(500, "the server failed; its log says why", code="internal_error")


def _of_validation(error: RequestValidationError) -> APIError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be parsed')}")
    part, *location = first["loc"]
    where = field_name(_in_body(location, error.body) if part == "body" else location)
    own = first.get("ctx", {}).get("error")
    message = str(own) if isinstance(own, ValueError) else first["msg"]
    if not where and not isinstance(own, ValueError):
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return APIError(400, f"{where or 'the body'}: {message}", param=where or None)


def _in_body(location: Sequence[str | int], body: Any) -> Sequence[str | int]:
    """A location without the types that Pydantic tried there: it leads to what is in the body, or is missing there."""
    for depth, part in enumerate(location):
        if isinstance(body, dict):
            if part not in body:
                return location[: depth + 1]
        elif not isinstance(body, list) or not isinstance(part, int):
            return location[:depth]
        body = body[part]
    return location


def field_name(location: Sequence[str | int]) -> str:
    """A place in a body as OpenAI writes it: ("messages", 0, "role") is messages[0].role."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


@contextmanager
def blame(field: str) -> Iterator[None]:
    """Have an InputError that names no field name this one."""
    try:
        yield
    except InputError as error:
        error.field = error.field or field
        raise


def log_failure(error: Exception) -> None:
    """Log an error that is nobody's fault but the server's."""
    if not isinstance(error, APIError) and as_api_error(error).status >= 500:
        _log.error("a request failed", exc_info=error)


async def _answer(_: Request, error: Exception) -> Response:
    log_failure(error)
    return as_api_error(error).response()


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = f"{request.method:.16}", f"{request.scope['path']!r:.100}"
    if error.status_code == HTTPStatus.NOT_FOUND and error.detail == HTTPStatus.NOT_FOUND.phrase:
        error.detail = f"there is no {path} here ({method})"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error.detail = f"{path} does not take {method}: use {(error.headers or {}).get('Allow', 'another method')}"
    return as_api_error(error).response()


async def _answer_unforeseen(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()  # whoever runs the app gets the error too, and logs it


def add_handlers(app: FastAPI) -> None:
    """Have every error of an app's endpoints answered so."""
    for kind in (ProlepsisError, RequestValidationError):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_unforeseen)
