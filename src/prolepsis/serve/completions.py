"""/v1/completions: text that continues a prompt."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.serve.state import ServerState, server_state

router = APIRouter()


class CompletionBody(BaseModel):
    """What is asked for."""

    model: str | None = None
    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None


@router.post("/v1/completions")
async def create(body: CompletionBody, state: Annotated[ServerState, Depends(server_state)]) -> dict[str, Any]:
    """Continue a prompt."""
    state.require_model(body.model)
    params = SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature, seed=body.seed)
    stream = state.require_ready().generate(body.prompt, params)
    async for _ in stream:
        pass
    done = stream.completion
    return {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": state.started,
        "model": state.model_name,
        "choices": [{"index": 0, "text": done.text, "finish_reason": done.finish_reason, "logprobs": None}],
    }
