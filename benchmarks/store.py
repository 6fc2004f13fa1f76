"""What a store of coded K and V buys after a restart, and what coding in the background costs meanwhile.

python benchmarks/store.py [--model MODEL] [--text FILE] [--tokens 4096] [--directory DIRECTORY]

restart: a process reads a prompt, answers, stores K and V on the disk and ends. Another one continues the conversation,
once restoring its beginning and once computing it, in turns. `first` is the first request of that process.

decode: in one process, a sequence generates while nothing is coded (A) and while there is more to code than can be (B),
in turns: A, B, A, B ... `loss` compares the medians of seconds a token.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from measuring import parser, report

from prolepsis import LLM, SamplingParams
from prolepsis.coding.cache_dtypes import arrays_of
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.model.pull import DEFAULT_MODEL
from prolepsis.store import open_tiers

ANSWER, QUESTION, GENERATED = 32, 48, 1000


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def ask(engine: AsyncEngine, prompt: list[int], tokens: int, salt: str = "") -> tuple[list[int], Any]:
    """(the answer, its statistics)."""
    stream = engine.generate(prompt, greedy(tokens), cache_salt=salt)
    answer = [delta.token.token async for delta in stream]
    return answer, stream.completion.statistics


def kv_hash(llm: LLM, tokens: list[int], salt: str) -> str:
    """Of K and V of all `tokens`, which the pool has."""
    assert llm.engine.prefix is not None
    table = llm.kv_cache.new_table()
    llm.engine.prefix.match(table, [*tokens, 0], salt)
    try:
        assert table.length == len(tokens)
        hashed = blake2b()
        for array in arrays_of(llm.kv_cache.read(table, 0, len(tokens))):
            hashed.update(array.tobytes())
        return hashed.hexdigest()
    finally:
        table.release()


def new_llm(arguments: Any) -> LLM:
    return LLM(arguments.model, threads=arguments.threads, max_context=arguments.tokens + 1024)


def text_of(arguments: Any, llm: LLM) -> list[int]:
    text = Path(arguments.text).read_text(encoding="utf-8", errors="replace")[: 16 * arguments.tokens]
    tokens = llm.tokenizer.encode(text)
    assert len(tokens) >= arguments.tokens + (arguments.runs + 1) * QUESTION, (
        f"{arguments.text} has only {len(tokens)} tokens"
    )
    return tokens


async def fill(arguments: Any) -> dict[str, Any]:
    """The first process: what it computed and stored."""
    llm = new_llm(arguments)
    store = KVStore(llm, open_tiers([f"disk:{arguments.directory}:8GiB"]))
    async with AsyncEngine(llm, store) as engine:
        prompt = text_of(arguments, llm)[: arguments.tokens]
        answer, _ = await ask(engine, prompt, ANSWER)
        start = time.perf_counter()
        assert await engine.flush()
        flushed = time.perf_counter() - start
        beginning = [*prompt, *answer[:-1]]
        found = await engine.call(lambda: kv_hash(llm, beginning, ""))
    store.close()
    done = store.statistics()
    return {
        "answer": answer,
        "kv": found,
        "stored_tokens": done.stored_tokens,
        "raw_bytes": done.stored_raw_bytes,
        "coded_bytes": done.stored_coded_bytes,
        "ratio": done.ratio,
        "encode_s": done.encode_seconds,
        "flush_s": flushed,
    }


async def go_on(arguments: Any) -> dict[str, Any]:
    """The second process: its times to first token."""
    before = json.loads(sys.stdin.read())
    llm = new_llm(arguments)
    store = KVStore(llm, open_tiers([f"disk:{arguments.directory}:8GiB"]))
    text = text_of(arguments, llm)
    beginning = [*text[: arguments.tokens], *before["answer"][:-1]]
    restored, cold, plans = [], [], []
    prefix = llm.engine.prefix
    assert prefix is not None
    async with AsyncEngine(llm, store) as engine:
        for run in range(arguments.runs + 1):
            first = arguments.tokens + run * QUESTION
            prompt = [*beginning, before["answer"][-1], *text[first : first + QUESTION]]
            answer, statistics = await ask(engine, prompt, ANSWER)
            assert await engine.call(lambda: kv_hash(llm, beginning, "")) == before["kv"], "other K and V"
            restored.append(statistics.ttft_s)
            plans.append(statistics)
            await engine.call(prefix.clear)
            other, statistics = await ask(engine, prompt, ANSWER, salt=f"never seen {run}")
            assert statistics.cached_tokens == 0
            assert answer == other, "other tokens"
            cold.append(statistics.ttft_s)
            await engine.flush()
            await engine.call(prefix.clear)
    store.close()
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": plans[0].cached_tokens,
        "first_restored_s": restored[0],
        "restored_s": median(restored[1:]),
        "cold_s": median(cold[1:]),
        "gain": median(cold[1:]) / median(restored[1:]),
        "plan": plans[-1].restore.summary(),
    }


async def decode(arguments: Any) -> dict[str, Any]:
    """Seconds a token without and with coding in the background."""
    llm = new_llm(arguments)
    tiers = open_tiers(["memory:8GiB"])
    store = KVStore(llm, tiers)
    text = text_of(arguments, llm)
    prompt = text[: arguments.tokens]
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    pauses: dict[str, list[float]] = {"A": [], "B": []}
    coded = 0
    async with AsyncEngine(llm, store) as engine:
        await ask(engine, prompt, 1)
        for arm in "AB" * arguments.runs + "A":
            await engine.flush()
            before = store.statistics().stored_segments
            if arm == "B":
                for key in list(tiers.keys("kv")):
                    tiers.delete(key)
                await ask(engine, prompt, 1)  # which is in the pool, and not in the store
            _, statistics = await ask(engine, text[-64:], GENERATED)
            between = statistics.inter_token_s[8:]
            if arm == "B":
                assert store.statistics().queued_segments > 0, "there was not enough to code"
                coded += store.statistics().stored_segments - before
            seconds[arm].append(sum(between) / len(between))
            pauses[arm] += between
    store.close()
    return {
        "without_s": median(seconds["A"]),
        "with_s": median(seconds["B"]),
        "loss": 1 - median(seconds["A"]) / median(seconds["B"]),
        "p99_without_s": sorted(pauses["A"])[len(pauses["A"]) * 99 // 100],
        "p99_with_s": sorted(pauses["B"])[len(pauses["B"]) * 99 // 100],
        "coded_segments": coded,
        "rounds": seconds,
    }


def in_another_process(arguments: Any, phase: str, given: str = "") -> dict[str, Any]:
    command = [sys.executable, __file__, "--phase", phase]
    for name in ("model", "text", "tokens", "directory", "runs", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{phase} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--text", default=str(Path(__file__).parents[1] / "docs" / "design.md"))
    arguments.add_argument("--tokens", type=int, default=4096, help="of the conversation's beginning")
    arguments.add_argument("--directory", help="where the store is kept; by default a temporary one")
    arguments.add_argument("--phase", choices=("fill", "go_on", "decode"), help="what a child process does")
    found = arguments.parse_args()
    if found.phase:
        print(json.dumps(asyncio.run({"fill": fill, "go_on": go_on, "decode": decode}[found.phase](found))))
        return
    with tempfile.TemporaryDirectory(prefix="prolepsis-store-") as temporary:
        found.directory = found.directory or temporary
        filled = in_another_process(found, "fill")
        continued = in_another_process(found, "go_on", json.dumps(filled))
    decoded = in_another_process(found, "decode")
    restart = {
        "what": "first token after a restart, restored",
        "seconds": continued["restored_s"],
        "cached tokens": continued["cached_tokens"],
        "tokens/s": None,
        "p99, ms": None,
    }
    rows = [
        restart,
        {
            **restart,
            "what": "first token after a restart, computed",
            "seconds": continued["cold_s"],
            "cached tokens": 0,
        },
        *(
            {
                "what": f"decode, {how} coding in the background",
                "seconds": None,
                "cached tokens": None,
                "tokens/s": 1 / decoded[f"{how}_s"],
                "p99, ms": 1000 * decoded[f"p99_{how}_s"],
            }
            for how in ("without", "with")
        ),
    ]
    filled.pop("answer")
    report("store", rows, found, model=found.model, stored=filled, restart=continued, decode=decoded)


if __name__ == "__main__":
    main()
