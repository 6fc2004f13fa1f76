"""Stream several answers at once from asyncio, and cancel one of them.

python examples/many_at_once.py [MODEL]
"""

import asyncio
import sys
from contextlib import aclosing

from prolepsis import LLM, AsyncEngine, SamplingParams

PROMPTS = ["The KV cache is", "Paris is the capital of", "1, 2, 3, 4,"]


async def answer(engine: AsyncEngine, prompt: str, most: int) -> str:
    """The answer to one prompt; leaving the loop cancels the request, and its blocks are free."""
    parts: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params)) as deltas:
        async for delta in deltas:
            parts.append(delta.text)
            if len(parts) == most:
                break
    return "".join(parts)


async def main(model: str) -> None:
    """Two answers run to their end; the third reader has had enough after five tokens."""
    llm = LLM(model, max_context=512)
    async with AsyncEngine(llm) as engine:
        answers = await asyncio.gather(
            *(answer(engine, prompt, most) for prompt, most in zip(PROMPTS, (16, 16, 5), strict=True))
        )
    for prompt, text in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r} -> {text!r}")
    now = llm.engine.statistics()
    print(f"finished {now.finished}, cancelled {now.cancelled}, blocks in use {llm.kv_cache.pool.num_used}")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["smollm2:135m"])))
