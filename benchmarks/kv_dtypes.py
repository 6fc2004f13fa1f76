"""What each dtype of the KV cache costs in quality, what it takes in memory, and what the codec makes of it.

python benchmarks/kv_dtypes.py [MODEL] --text FILE [--contexts 512,2048] [--tokens 4096] [--dtypes ...] [--json]

Perplexity and mean KL in nats from the same model with a bf16 cache, over windows of a context each, in teacher
forcing; and for a sequence of the longest context the bytes of a token in bf16, in the cache, and coded losslessly with
a profile measured on it. What kivi4 keeps exactly beside its codes, 128 tokens at most of each sequence, is not in
these bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from prolepsis import LLM
from prolepsis.coding import encode
from prolepsis.engine.perplexity import log_softmax
from prolepsis.model.pull import DEFAULT_MODEL

DTYPES = ("bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "kivi4")


def compare(llms: dict[str, LLM], tokens: list[int], context: int) -> dict[str, dict[str, float]]:
    """For each dtype, perplexity and mean KL from bf16, all caches fed the same windows."""
    nats, divergence = dict.fromkeys(llms, 0.0), dict.fromkeys(llms, 0.0)
    predicted = rows = 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context]
        sequences = {dtype: llm.runner.new_sequence(window) for dtype, llm in llms.items()}
        while (first := sequences["bf16"].num_cached) < len(window):
            exact = np.empty(0)
            for dtype, llm in llms.items():
                p = log_softmax(llm.runner.all_logits(sequences[dtype]))
                exact = p if dtype == "bf16" else exact
                following = window[first + 1 : first + 1 + len(p)]
                nats[dtype] -= float(p[np.arange(len(following)), following].sum())
                divergence[dtype] += float((np.exp(exact) * (exact - p)).sum())
            predicted, rows = predicted + len(following), rows + len(exact)
        for sequence in sequences.values():
            sequence.release()
    return {
        dtype: {"perplexity": float(np.exp(nats[dtype] / predicted)), "mean_kl": divergence[dtype] / rows}
        for dtype in llms
    }


def sizes(llm: LLM, tokens: list[int]) -> dict[str, float]:
    """Bytes of a token, and both ratios, of a sequence of these tokens."""
    cache, sequence = llm.kv_cache, llm.runner.new_sequence(tokens)
    llm.runner.prefill(sequence)
    held = cache.readable(len(tokens))
    bf16 = 4 * cache.num_layers * cache.num_kv_heads * cache.head_dim
    coded = len(encode(cache.read(sequence.table, 0, held), dtype=cache.dtype, rope=llm.rope)) / held
    sequence.release()
    return {
        "bf16_bytes": bf16, "cache_bytes": cache.bytes_per_token, "coded_bytes": coded,
        "dtype_ratio": bf16 / cache.bytes_per_token, "coded_ratio": cache.bytes_per_token / coded,
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description="quality and size of each dtype of the KV cache")
    arguments.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--contexts", default="512,2048")
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--dtypes", default=",".join(DTYPES))
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    contexts = [int(part) for part in asked.contexts.split(",")]
    dtypes = dict.fromkeys(["bf16", *asked.dtypes.split(",")])
    room = {"max_context": max(contexts), "max_running": 1, "prefix_caching": False, "preemption": "recompute"}
    llms = {dtype: LLM(asked.model, kv_dtype=dtype, **room) for dtype in dtypes}
    tokens = llms["bf16"].tokenizer.encode(asked.text.read_text())[: asked.tokens]
    quality = {context: compare(llms, tokens, context) for context in contexts}
    size = {dtype: sizes(llm, tokens[: max(contexts)]) for dtype, llm in llms.items()}
    report: dict[str, Any] = {
        "model": llms["bf16"].name,
        "tokens": len(tokens),
        "rows": [
            {"dtype": dtype, **size[dtype], "quality": {str(c): quality[c][dtype] for c in contexts}} for dtype in llms
        ],
    }
    if asked.json:
        print(json.dumps(report))
        return
    show(report, contexts)


def show(report: dict[str, Any], contexts: list[int]) -> None:
    table = Table(title=f"{report['model']}: {report['tokens']} tokens", box=box.SIMPLE)
    names = ["dtype", *(f"{what} {c}" for c in contexts for what in ("ppl", "KL"))]
    for name in [*names, "bytes a token", "to bf16", "coded", "to cache", "coded to bf16"]:
        table.add_column(name, justify="right")
    for row in report["rows"]:
        figures = [row["quality"][str(c)] for c in contexts]
        told = [text for one in figures for text in (f"{one['perplexity']:.3f}", f"{one['mean_kl']:.6f}")]
        ratios = (f"{row['dtype_ratio']:.3f}", f"{row['coded_bytes']:.0f}", f"{row['coded_ratio']:.3f}")
        table.add_row(
            row["dtype"], *told, str(row["cache_bytes"]), *ratios, f"{row['bf16_bytes'] / row['coded_bytes']:.3f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
