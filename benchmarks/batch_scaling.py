"""Decode speed as the batch and the context grow: does ten times the context cost what it should?

python benchmarks/batch_scaling.py [--batches 1,4,16,32] [--contexts 100,1000,8000] [--kv-dtype DTYPE] [--plot FILE]

Every sequence of a batch has K and V of its own in memory. `ms` is one decode step of the whole batch, `tokens/s` its
batch over it, `KV GB/s` the bytes of K and V the step reads. Combinations whose cache exceeds --kv-memory are left out.
"""

import sys
from typing import Any

from measuring import numbers, parser, report, rounds

from prolepsis import LLM
from prolepsis.engine.sequence import Sequence
from prolepsis.model.pull import DEFAULT_MODEL

STEPS = 8  # decode steps in one measured call


def sequences(llm: LLM, count: int, context: int) -> list[Sequence]:
    """One sequence of `context` random tokens, and copies of it in blocks of their own."""
    tokens = [(7919 * i + 13) % llm.config.vocab_size for i in range(context)]
    first = llm.runner.new_sequence(tokens)
    llm.runner.prefill(first)
    many = [first]
    for _ in range(count - 1):
        copy = llm.runner.new_sequence(tokens)
        copy.table.append(context)
        llm.kv_cache.copy_blocks(list(zip(first.table.blocks.tolist(), copy.table.blocks.tolist(), strict=True)))
        many.append(copy)
    return many


def measure(llm: LLM, batch: int, context: int, runs: int) -> dict[str, Any]:
    """Median time of a decode step of `batch` sequences that hold `context` tokens."""
    many = sequences(llm, batch, context)

    def work() -> None:
        for sequence in many:
            sequence.truncate(context)
        for step in range(STEPS):
            for sequence in many:
                sequence.tokens.append(step)
            llm.runner.step(many)

    seconds = rounds({"step": work}, runs)["step"] / STEPS
    for sequence in many:
        sequence.release()
    return {
        "context": context,
        "batch": batch,
        "ms": seconds * 1e3,
        "tokens/s": batch / seconds,
        "KV GB/s": batch * context * llm.kv_cache.bytes_per_token / seconds / 1e9,
    }


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the time of a step over the context, a line for each batch, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms for a decode step")
    for batch in dict.fromkeys(row["batch"] for row in rows):
        line = [row for row in rows if row["batch"] == batch]
        axes.plot([row["context"] for row in line], [row["ms"] for row in line], marker="o", label=f"batch {batch}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure every batch at every context."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", default=DEFAULT_MODEL)
    flags.add_argument("--batches", type=numbers, default=[1, 4, 16, 32], metavar="N,N,...")
    flags.add_argument("--contexts", type=numbers, default=[100, 1000, 8000], metavar="N,N,...")
    flags.add_argument("--kv-memory", type=int, default=4096, metavar="MB")
    flags.add_argument("--kv-dtype", default="bf16", help="number format of the cache")
    flags.add_argument("--plot", metavar="FILE", help="draw the figures too (.svg or .png; needs matplotlib)")
    arguments = flags.parse_args()
    llm = LLM(
        arguments.model,
        threads=arguments.threads,
        kv_memory=arguments.kv_memory * 1_000_000,
        kv_dtype=arguments.kv_dtype,
    )
    rows = []
    for context in arguments.contexts:
        for batch in arguments.batches:
            blocks = -(-(context + STEPS) // llm.kv_cache.block_size) * batch
            if context + STEPS > llm.max_context or blocks > llm.kv_cache.pool.num_blocks:
                print(f"left out: context {context}, batch {batch}: no room", file=sys.stderr)
            else:
                rows.append(measure(llm, batch, context, arguments.runs))
    if arguments.plot:
        plot(rows, arguments.plot)
    report("decode of a batch", rows, arguments, model=arguments.model, kv_dtype=arguments.kv_dtype)


if __name__ == "__main__":
    main()
