"""What quantisation costs: every method and width of `prolepsis quantize` beside the model that it was made of.

    python benchmarks/quantization.py MODEL --calibration TEXT --text TEXT [--only gptq4,rtn4] [--plot FILE.svg]

Perplexity, mean KL from the unquantised model and top-1 agreement on a text that is held out of calibration; bits a
weight of the layers' matrices with all scales, size of the files, and the seconds of processor time that making them
took (with OPENBLAS_NUM_THREADS=1 those of one core). With --directory models are kept there; those that are there are
not made again.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import parser, report

from prolepsis import LLM
from prolepsis.engine.perplexity import compare
from prolepsis.model.model_file import ModelFile, open_model
from prolepsis.model.pull import resolve
from prolepsis.quantize.job import quantise
from prolepsis.quantize.options import Options
from prolepsis.quantize.report import Report

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{method}{bits}": {"method": method, "bits": bits}
        for bits in (8, 4, 3, 2)
        for method in ("rtn", "gptq", "awq")
    },
    "mixed4.5": {"method": "mixed", "bits": 4.5},
    "mixed4.25": {"method": "mixed", "bits": 4.25},
    "mixed3.5": {"method": "mixed", "bits": 3.5},
    **{
        name: {"method": "rtn", "gguf_type": name}
        for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K")
    },
    "Q4_0 gptq": {"method": "gptq", "gguf_type": "Q4_0"},
    "Q4_0 awq": {"method": "awq", "gguf_type": "Q4_0"},
}
COLOURS = {"rtn": "#999999", "gptq": "#0072B2", "awq": "#D55E00", "mixed": "#009E73", "gguf": "#CC79A7"}


def applies(case: str, model: ModelFile) -> bool:
    """Whether all rows of the model are whole blocks of the case's type."""
    return not case.endswith("_K") or not (model.config.hidden_size % 256 or model.config.intermediate_size % 256)


def make(model: ModelFile, case: str, arguments: Any, directory: Path) -> tuple[Path, Report | None]:
    """The case's model in `directory`."""
    place = directory / (case.replace(" ", "-") + (".gguf" if "gguf_type" in CASES[case] else ""))
    if place.exists():
        return place, None
    choices = {**CASES[case], "samples": arguments.samples, "length": arguments.length}
    if choices["method"] != "mixed" and "gguf_type" not in choices and arguments.group is not None:
        choices["group"] = arguments.group
    options = Options(**choices)
    texts = [path.read_text("utf-8") for path in arguments.calibration] if options.uses_texts else []
    start = time.process_time()
    made = quantise(model, options, texts, place)
    return place, made._replace(seconds=time.process_time() - start)


def measure(case: str, llm: LLM, tokens: Sequence[int], arguments: Any, directory: Path) -> dict[str, Any]:
    """A row of the table."""
    place, made = make(open_model(llm.path), case, arguments, directory)
    other = LLM(place, max_context=arguments.context, threads=arguments.threads)
    outcome = compare(llm.runner, other.runner, tokens, arguments.context)
    return {
        "model": case,
        "bits": None if made is None else round(made.layer_bits, 2),
        "MB": round(other.model_bytes / 1e6, 2),
        "perplexity": f"{outcome.model.perplexity:.3f}",
        "mean KL": f"{outcome.kl:.5f}",
        "same top": f"{outcome.same_top:.2%}",
        "CPU s": None if made is None else round(made.seconds, 1),
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """KL against bits of the layers' matrices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="bits a weight of the layers", ylabel="mean KL, nats")
    for family, colour in COLOURS.items():
        points = [row for row in rows if row["bits"] and family == family_of(row["model"])]
        points.sort(key=lambda row: row["bits"])
        x, y = [row["bits"] for row in points], [float(row["mean KL"]) for row in points]
        axes.plot(x, y, color=colour, marker="o", markersize=4, linewidth=1, label=family)
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path)


def family_of(case: str) -> str:
    """Of which line of the plot a case is."""
    return "gguf" if case.startswith("Q") else case.rstrip("0123456789.")


def main() -> None:
    """Make and measure every case."""
    arguments = parser(__doc__.split("\n\n")[0].replace("%", "%%"))
    arguments.add_argument("model")
    arguments.add_argument("--calibration", type=Path, action="append", required=True)
    arguments.add_argument("--text", type=Path, required=True, help="held out: what is measured on")
    arguments.add_argument("--only", type=lambda text: text.split(","), default=list(CASES), metavar="CASE,CASE")
    arguments.add_argument("--samples", type=int, default=64)
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--group", type=int)
    arguments.add_argument("--directory", type=Path, help="keep the models there")
    arguments.add_argument("--plot", type=Path, help="draw KL against bits there")
    options = arguments.parse_args()
    llm = LLM(resolve(options.model), max_context=options.context, threads=options.threads)
    tokens = llm.tokenizer.encode(options.text.read_text("utf-8"))
    itself = compare(llm.runner, llm.runner, tokens, options.context)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        cases = [case for case in options.only if applies(case, open_model(llm.path))]
        rows = [measure(case, llm, tokens, options, directory) for case in cases]
    if options.plot:
        plot(rows, options.plot)
    report(
        "quantization",
        rows,
        options,
        reference={"perplexity": itself.model.perplexity, "MB": llm.model_bytes / 1e6},
        tokens=itself.model.tokens,
    )


if __name__ == "__main__":
    main()
