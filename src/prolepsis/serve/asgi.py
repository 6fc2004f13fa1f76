"""What the middlewares share. They are plain ASGI: a stream and its client's leaving pass through them untouched."""

from starlette.types import Message, Receive, Scope, Send

from prolepsis.serve.errors import APIError

NO_RETRY = {"X-Should-Retry": "false"}
"""OpenAI's clients send a request again after 408, 409, 429 and 5xx, unless the answer says so."""


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error."""
    await error.response()(scope, receive, send)


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header, by its lower-case name; None where the request has none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def is_last(message: Message) -> bool:
    """Whether a message ends the answer."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)
