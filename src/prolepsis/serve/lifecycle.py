"""From start to end of a server process."""

import asyncio
from collections.abc import Callable

import uvicorn

from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.llm import LLM
from prolepsis.serve.app import create_app
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState


def run(options: ServeOptions, load: Callable[[], LLM]) -> None:
    """Serve until the process is told to end. `load` makes the model, and may take long."""
    state = ServerState(options)
    state.ready(AsyncEngine(load()))
    config = uvicorn.Config(create_app(state), host=options.host, port=options.port, log_level="warning")
    try:
        uvicorn.Server(config).run()
    finally:
        engine = state.engine
        if engine is not None:
            asyncio.run(engine.close())
