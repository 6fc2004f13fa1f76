"""What the benchmark scripts share: fair rounds, medians, the memory's speed, the machine in words, tables and JSON."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, prange
from rich import box
from rich.console import Console
from rich.table import Table

from prolepsis.kernels.team import default_threads

_WIDE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "sve")
_PROBE_BYTES = 1 << 28  # far more than any cache


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags every benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--runs", type=int, default=5, help="measured rounds, of which the median is shown")
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return arguments


def numbers(text: str) -> list[int]:
    """The value of a flag such as 1,4,16."""
    return [int(part) for part in text.split(",")]


def rounds(contenders: Mapping[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Median seconds of each contender. They take turns, so that a slower or faster minute of the machine meets all.

    A turn begins with a call that does not count: the thread pool of whoever came before goes to sleep in it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, work in contenders.items():
            work()
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


@njit(parallel=True)
def _sum(values):
    total = np.uint64(0)
    for i in prange(values.size):
        total += values[i]
    return total


def memory_bandwidth(runs: int) -> float:
    """Bytes a second that all threads together read from memory, one after the other: what no kernel can exceed."""
    values = np.ones(_PROBE_BYTES // 8, np.uint64)
    return _PROBE_BYTES / rounds({"sum": lambda: _sum(values)}, runs)["sum"]


def copy_bandwidth(threads: int, runs: int) -> float:
    """Bytes a second that `threads` move from memory to memory with the C library's copy: read and written ones."""
    halves = [np.array_split(np.ones(_PROBE_BYTES // 8, np.uint64), threads) for _ in range(2)]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * _PROBE_BYTES / rounds({"copy": lambda: list(pool.map(np.copyto, *halves))}, runs)["copy"]


def machine(threads: int) -> dict[str, Any]:
    """The machine and the software that matters, for the caption of a table."""
    cpu = _cpu()
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "family": cpu.get("cpu family", ""),
        "vectors": [flag for flag in _WIDE if flag in flags],
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in ("numba", "torch", "llama_cpp") if version(name)},
    }


def version(module: str) -> str:
    """Version of an installed module, or nothing."""
    from importlib.metadata import PackageNotFoundError, packages_distributions
    from importlib.metadata import version as version_of

    if find_spec(module) is None:
        return ""
    try:
        return version_of(packages_distributions()[module][0])
    except (KeyError, PackageNotFoundError):
        return "?"


def _cpu() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def report(title: str, rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, **facts: Any) -> None:
    """Print the rows as a table in Markdown, or with --json everything as one object."""
    facts = {"machine": machine(arguments.threads), **facts}
    if arguments.json:
        print(json.dumps({"benchmark": title, **facts, "rows": rows}))
        return
    table = Table(box=box.MARKDOWN)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    console = Console(width=160, soft_wrap=True, highlight=False)
    console.print(title, table, *(f"{name}: {_shown(value)}" for name, value in facts.items()), sep="\n")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items() if part)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
