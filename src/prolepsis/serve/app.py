"""The app: every endpoint, over one state."""

from fastapi import FastAPI

from prolepsis.serve import chat, completions, live, metrics, models, page, sessions
from prolepsis.serve.errors import add_handlers
from prolepsis.serve.state import ServerState

_ROUTERS = (
    models.router,
    completions.router,
    chat.router,
    sessions.router,
    live.router,
    metrics.router,
    page.router,
)


def create_app(state: ServerState) -> FastAPI:
    """An ASGI app over `state`, which whoever runs it makes ready and ends (`lifecycle`)."""
    app = FastAPI(title="Prolepsis", docs_url=None, redoc_url=None)
    app.state.server = state
    app.state.live = live.Live(state)
    app.state.metrics = metrics.Metrics(app.state.live, state.answers)
    add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router)
    return app
