"""The app: every endpoint, over one state."""

from fastapi import FastAPI

from prolepsis.serve import completions, live, models
from prolepsis.serve.errors import add_handlers
from prolepsis.serve.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """An ASGI app over `state`, which whoever runs it makes ready and ends (`lifecycle`)."""
    app = FastAPI(title="Prolepsis", docs_url=None, redoc_url=None)
    app.state.server = state
    app.state.live = live.Live(state)
    add_handlers(app)
    for module in (models, completions, live):
        app.include_router(module.router)
    return app
