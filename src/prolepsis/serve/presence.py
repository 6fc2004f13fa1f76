"""Work for a client, for as long as it is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from prolepsis.serve.errors import APIError

T = TypeVar("T")


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Once the client is gone it is cancelled, and APIError 499 raised. The body has been read."""
    done, gone = asyncio.create_task(work), asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise APIError(499, "the client has gone")  # nobody reads it, but it may be logged
        return done.result()
    finally:
        await ended(done, gone)


async def disconnected(receive: Receive) -> None:
    """Return once the client is gone. Its body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait until they are done; what they raise is not told."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
