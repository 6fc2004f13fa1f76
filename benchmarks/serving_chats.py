"""Chats that share a system prompt, on our server: without and with prefix caching and a store (see `serve.py`)."""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from serving_load import Client, Told
from serving_servers import ours, running

from prolepsis.model.config import ModelConfig
from prolepsis.model.gguf_file import GGUFFile

SYSTEM_WORDS, USER_WORDS, ANSWER_TOKENS = 350, 120, 32
_TOKENS_A_WORD = 1.35
_VALUE_BYTES = 2  # of bf16 K and V
_STORE = ("--store", "memory:1GiB")


class Mode(NamedTuple):
    """A way to serve chats."""

    name: str
    pool_chats: float
    """How many of the chats the pool has room for."""
    options: tuple[str, ...] = ()
    shares: bool = True
    """False: every request has a salt of its own, so that nothing is shared."""


def chat_rows(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """A row for each way to serve them."""
    few, all_ = min(2.0, arguments.chats), arguments.chats + 2.0
    modes = (
        Mode("no prefix cache", few, shares=False),
        Mode("prefix cache", few),
        Mode("prefix cache and store", few, _STORE),
        Mode("prefix cache, pool for all", all_),
    )
    rows = []
    for mode in modes:
        print(f"chats, {mode.name}", file=sys.stderr)
        options = ("--kv-memory", str(_pool_bytes(model, mode, arguments.turns)), *mode.options)
        with running(ours(model, arguments.threads, *options, *arguments.option)) as client:
            rows.append({"chats": mode.name, **asyncio.run(_converse(client, mode, arguments))})
    return rows


def _pool_bytes(model: str, mode: Mode, turns: int) -> int:
    config = ModelConfig.from_gguf(GGUFFile.open(model))
    tokens = _TOKENS_A_WORD * (SYSTEM_WORDS + turns * USER_WORDS) + turns * ANSWER_TOKENS
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * _VALUE_BYTES
    return round(mode.pool_chats * tokens * token_bytes)


async def _converse(client: Client, mode: Mode, arguments: argparse.Namespace) -> dict[str, Any]:
    """All chats, turn by turn."""
    text = (Path(__file__).parents[1] / "src" / "prolepsis" / "data" / "kv-cache-guide.md").read_text()
    words = sorted({word for word in text.split() if word.isalpha()})
    source = random.Random(0)
    system = " ".join(text.split()[:SYSTEM_WORDS])
    histories = [f"System: {system}\n"] * arguments.chats
    later: list[Told] = []
    every: list[Told] = []
    begin = time.perf_counter()
    for turn in range(arguments.turns):
        for chat in range(arguments.chats):
            question = " ".join(source.choices(words, k=USER_WORDS))
            prompt = f"{histories[chat]}User: {question}\nAssistant:"
            told = Told(time.perf_counter())
            salt = {} if mode.shares else {"cache_salt": f"{turn} {chat}"}
            await client.ask(prompt, ANSWER_TOKENS, told, **salt)
            if told.error:
                raise RuntimeError(f"a chat failed: {told.error}")
            histories[chat] = f"{prompt}{told.text}\n"
            every.append(told)
            later += [told] if turn else []
    first = [1000 * (told.times[0] - told.asked) for told in later]
    prompts = sum(told.prompt_tokens for told in later)
    return {
        "TTFT p50 ms": float(np.percentile(first, 50)),
        "TTFT p95 ms": float(np.percentile(first, 95)),
        "prompt tokens": prompts,
        "in a cache": sum(told.cached_tokens for told in later) / prompts,
        "seconds": time.perf_counter() - begin,
    }
