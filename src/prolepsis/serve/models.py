"""What the server is and has: models, version, health, and its tokenizer."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from prolepsis.serve.state import ServerState, server_state

router = APIRouter()
State = Annotated[ServerState, Depends(server_state)]


@router.get("/health")
async def health(state: State) -> dict[str, str]:
    """200 once requests can be answered, 503 before and while the server shuts down."""
    state.require_ready()
    return {"status": state.phase}


@router.get("/version")
async def version_() -> dict[str, str]:
    """The version of Prolepsis."""
    try:
        return {"version": version("prolepsis")}
    except PackageNotFoundError:
        return {"version": "unknown"}


@router.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """The one model that there is."""
    return {"object": "list", "data": [_model(state)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict[str, Any]:
    """That model, or 404."""
    state.require_model(name)
    return _model(state)


def _model(state: ServerState) -> dict[str, Any]:
    engine = state.engine
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "prolepsis",
        "max_model_len": None if engine is None else engine.llm.max_context,
    }
