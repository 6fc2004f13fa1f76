"""What rounding the activations costs: the float32 reference against itself with rounded inputs of every product.

python benchmarks/activation_rounding.py [MODEL] [--json]

Mean KL in nats over the texts of `reference.py`, for int8 and 16-bit integers by runs of 32, and bfloat16. Needs the
extra `test` (torch, transformers).
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from reference import _log_probabilities, load_reference, reference_logits
from reference_texts import TEXTS
from rich import box
from rich.console import Console
from rich.table import Table

from prolepsis import LLM
from prolepsis.kernels.cells import CELL
from prolepsis.kernels.rows import LARGEST_QUANT

Rounding = Callable[[torch.Tensor], torch.Tensor]


def by_cells(levels: float) -> Rounding:
    """Rounding to whole numbers of a step that makes the largest of 32 values `levels`."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        cells = x.reshape(*x.shape[:-1], -1, CELL)
        step = (cells.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-30)
        return (torch.round(cells / step) * step).reshape(x.shape)

    return rounded


ROUNDINGS: dict[str, Rounding] = {
    "int8": by_cells(127),
    "bf16": lambda x: x.bfloat16().float(),
    "int16": by_cells(LARGEST_QUANT),
}


def mean_divergences(reference: Any, rounding: Rounding, exact: dict[str, tuple[list[int], np.ndarray]]) -> list[float]:
    """Mean KL of each text, with `rounding` before every linear layer."""
    linear = [module for module in reference.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)) for module in linear]
    try:
        figures = []
        for tokens, p in exact.values():
            q = _log_probabilities(reference_logits(reference, tokens))
            figures.append(float((np.exp(p) * (p - q)).sum(axis=1).mean()))
        return figures
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    """Measure every rounding on every text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_context=2048)
    reference = load_reference(llm.path)
    tokens = {language: llm.encode(text) for language, text in TEXTS.items()}
    exact = {name: (ids, _log_probabilities(reference_logits(reference, ids))) for name, ids in tokens.items()}
    figures = {name: mean_divergences(reference, rounding, exact) for name, rounding in ROUNDINGS.items()}
    if arguments.json:
        print(json.dumps({"texts": list(TEXTS), **figures}))
        return
    table = Table("activations", *TEXTS, box=box.MARKDOWN)
    for name, row in figures.items():
        table.add_row(name, *(f"{value:.6f}" for value in row))
    Console().print(table)


if __name__ == "__main__":
    main()
