"""Bytes against work: every predictor, and twins that were tried, in one run on one text.

Calibrates on Python's language reference (which every CPython carries) and codes its last pages. Each row is real: a
profile is fitted, the KV is coded into memory as a session and decoded again, every bit compared, all threads at work.
Beside them stand what the engine takes to compute the KV from the tokens, and ideal rates in float32 of ways to round
activations that no kernel was written for.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import measuring
import numpy as np
from numpy.typing import NDArray

from prolepsis import LLM
from prolepsis.bench.float_predictor import FloatPredictor, closed_loop
from prolepsis.bench.mixture import Mixture
from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import DType, arrays_of, moderate_values, to_scalars
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.twin_calibration import fit_twin
from prolepsis.coding.twin_network import VARIANTS, TwinNetwork
from prolepsis.engine.profiles import WindowKV, calibrate, collect, kv_of_texts, target_of
from prolepsis.kernels.twin_pass import ATTENTION_OUT, DOWN, GATE_UP, GROUPS, QUERY

_WINDOW = 2048
_FINE, _COUNT = 3, 1  # columns of `twin_pass.Network.groups`
Edit = Callable[[NDArray[np.int64]], None]
Floats = NDArray[np.float32]


class Point(NamedTuple):
    """A predictor of the frontier, and what its profile is."""

    name: str
    profile: AnyProfile


def fine(*groups: int) -> Edit:
    """These products of every layer with activations of 16 bits."""

    def edit(layers: NDArray[np.int64]) -> None:
        layers[:, groups, _FINE] = 1

    return edit


def without(*groups: int, of: int, all_but: int = 0) -> Edit:
    """These products left out in one of `of` layers, or in all but one of `all_but`."""

    def edit(layers: NDArray[np.int64]) -> None:
        number = np.arange(len(layers))
        chosen = number % all_but != 0 if all_but else number % of == of - 1
        layers[np.ix_(chosen, groups, [_COUNT])] = 0

    return edit


# The MLP is three quarters of a layer's work, and what feeds it (gate and up) half.
EDITS: dict[str, Edit] = {
    "queries in 16 bits": fine(QUERY),
    "attention's output in 16 bits": fine(ATTENTION_OUT),
    "gate and up in 16 bits": fine(GATE_UP),
    "down in 16 bits": fine(DOWN),
    "all but gate and up in 16 bits": fine(QUERY, ATTENTION_OUT, DOWN),
    "no MLP in every 4th layer": without(GATE_UP, DOWN, of=4),
    "no MLP in every 2nd layer": without(GATE_UP, DOWN, of=2),
    "no MLP but in every 4th layer": without(GATE_UP, DOWN, of=1, all_but=4),
    "neither MLP nor attention in every 2nd layer": without(QUERY, ATTENTION_OUT, GATE_UP, DOWN, of=2),
}


def sample(llm: LLM, ids: list[int], dtype: DType, tokens: int) -> CalibrationSample:
    """A calibration sample of up to `tokens` of the ids."""
    return collect(llm, kv_of_texts(llm, [ids], dtype, _WINDOW, tokens), dtype, tokens)


def points(llm: LLM, calibration: CalibrationSample, tried: bool) -> Iterator[Point]:
    """From the cheapest predictor to the dearest; then what was tried."""
    target = target_of(llm)
    for kind in ("marginal", "static", "linear", "twin-int4", "twin-int8"):
        yield Point(kind, calibrate(llm, calibration, kind).profile)
    network = TwinNetwork.of(target, VARIANTS["twin-int8"])
    if tried:
        whole = fit_twin(calibration, network, "twin-int8")
        yield Point("twin-int8, no depth correction", uncorrected(whole, calibration))
        yield Point("twin-int8, open loop", fit_twin(calibration, network, "twin-int8", open_loop=True))
        for name, edit in EDITS.items():
            groups = network.groups.copy()
            edit(groups.reshape(-1, GROUPS, 5))
            changed = replace(network, groups=groups)
            yield Point(f"twin-int8, {name}", fit_twin(calibration, changed, "twin-int8"))
    yield Point("twin-int8a16", calibrate(llm, calibration, "twin-int8a16").profile)


def uncorrected(profile: Any, calibration: CalibrationSample) -> AnyProfile:
    """The twin with closed attention alone, its errors and tables fitted anew."""
    return fit_twin(calibration, profile.network, "twin-int8", corrections=np.zeros_like(profile.corrections))


def measure(llm: LLM, point: Point, text: WindowKV, dtype: DType, runs: int) -> dict[str, Any]:
    """A row: ratio of a whole session file, and tokens a second both ways."""
    rope, stored = llm.rope, sum(array.nbytes for array in arrays_of(text.kv))
    encode, decode, data = [], [], b""
    for _ in range(runs + 1):  # the first one does not count
        file = BytesIO()
        writer = SessionWriter(file, point.profile, dtype=dtype, rope=rope)
        start = time.perf_counter()
        writer.add(text.kv, text.ids)
        encode.append(time.perf_counter() - start)
        writer.finish()
        data = file.getvalue()
        reader = SessionReader(data, profile=None if point.profile.embedded else point.profile)
        _ = reader.coder
        start = time.perf_counter()
        decoded = reader.read_all()
        decode.append(time.perf_counter() - start)
        assert all(map(np.array_equal, arrays_of(decoded), arrays_of(text.kv)))
    return {
        "predictor": point.name,
        "ratio": stored / len(data),
        "bits a value": 8 * len(data) / arrays_of(text.kv)[0].size,
        "encode tok/s": len(text.ids) / float(np.median(encode[1:])),
        "decode tok/s": len(text.ids) / float(np.median(decode[1:])),
    }


def prefill(llm: LLM, ids: Sequence[int], runs: int) -> float:
    """Tokens a second at which the engine computes the same KV."""
    seconds = []
    for _ in range(runs + 1):
        sequence = llm.runner.new_sequence(ids)
        start = time.perf_counter()
        llm.runner.prefill(sequence)
        seconds.append(time.perf_counter() - start)
        sequence.release()
    return len(ids) / float(np.median(seconds[1:]))


class Rounding(FloatPredictor):
    """A float32 copy whose activations are rounded by any function of rows."""

    def __init__(self, plan: Any, round_rows: Callable[[Floats], Floats]) -> None:
        super().__init__(plan)
        self._round_rows = round_rows

    def _rounded(self, x: Floats) -> Floats:
        return self._round_rows(x)


def nearest(x: Floats, columns: int) -> Floats:
    """int8 with a step for each run of so many columns."""
    runs = x.reshape(-1, columns)
    steps = np.maximum(np.abs(runs).max(axis=1, keepdims=True) / np.float32(127), np.float32(1e-30))
    return (np.rint(runs / steps) * steps).reshape(x.shape)


def rotated(x: Floats, columns: int) -> Floats:
    """As `nearest`, in a basis turned by a Hadamard matrix over runs of 64 (QuaRot, arXiv:2404.00456)."""
    turn = np.ones((1, 1), np.float32)
    while len(turn) < 64:
        turn = np.block([[turn, turn], [turn, -turn]]) / np.float32(2**0.5)
    turned = (x.reshape(-1, 64) @ turn).reshape(x.shape).astype(np.float32)
    return (nearest(turned, columns).reshape(-1, 64) @ turn.T).reshape(x.shape).astype(np.float32)


def mixed(x: Floats, part: int) -> Floats:
    """A step for each 32; of each token's runs, the one in `part` with the largest numbers has 16 bits."""
    runs = x.reshape(len(x), -1, 32)
    largest = np.abs(runs).max(axis=2)
    limit = np.sort(largest, axis=1)[:, -max(1, runs.shape[1] // part)]
    quants = np.where(largest >= limit[:, None], np.float32(32639), np.float32(127))[..., None]
    steps = np.maximum(largest[..., None] / quants, np.float32(1e-30))
    return (np.rint(runs / steps) * steps).reshape(x.shape).astype(np.float32)


ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "one step a token": lambda x: nearest(x, x.shape[1]),
    "one step a token, rotated by 64": lambda x: rotated(x, x.shape[1]),
    "a step for each 32 (twin-int8)": lambda x: nearest(x, 32),
    "a step for each 32, rotated by 64": lambda x: rotated(x, 32),
    "a step for each 16": lambda x: nearest(x, 16),
    "a step for each 32, one run in 6 in 16 bits": lambda x: mixed(x, 6),
}


def ideal_rates(llm: LLM, calibration: WindowKV, text: WindowKV, dtype: DType) -> Iterator[dict[str, Any]]:
    """Under the published residual model, attention in closed loop, no depth correction, exact weights."""
    windows = [calibration, text]
    scalars = [to_scalars(window.kv, dtype) for window in windows]
    truths = [closed_loop(lambda layer, s=s: moderate_values(dtype)[s[layer]]) for s in scalars]
    for name, rounding in ROUNDINGS.items():
        predictor, bits = Rounding(llm.runner.decoder.plan, rounding), []
        walks = [predictor.predict(w.ids, truth) for w, truth in zip(windows, truths, strict=True)]
        for layer, (fitted, means) in enumerate(zip(*walks, strict=True)):
            mixture = Mixture.fitted(scalars[0][layer], fitted, dtype)
            bits.append(mixture.code_lengths(scalars[1][layer], means).sum())
        yield {"rounding of activations": name, "ideal bits a value": float(np.sum(bits)) / scalars[1].size}


def draw(rows: Sequence[dict[str, Any]], prefill_speed: float, title: str, path: Path) -> None:
    """Ratio against restore speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="restored tokens a second", title=title)
    axes.set_ylabel("stored bytes per coded byte")
    tried = 0
    for row in rows:
        x, y = row["decode tok/s"], row["ratio"]
        if "," not in row["predictor"]:
            axes.scatter(x, y, s=44, color="#0072B2")
            above = -12 if row["predictor"] == "twin-int4" else 5
            axes.annotate(row["predictor"], (x, y), (6, above), textcoords="offset points", fontsize=9)
            continue
        tried += 1
        name = f"{tried}: {row['predictor'].removeprefix('twin-int8, ')}"
        axes.scatter(x, y, s=18, color="#D55E00", marker="x", label=name)
        axes.annotate(str(tried), (x, y), (-9, -3), textcoords="offset points", fontsize=7)
    axes.axvline(prefill_speed, color="0.5", linestyle="--")
    axes.annotate("computed from the tokens", (prefill_speed, 1.05), (3, 0), textcoords="offset points", fontsize=7)
    axes.grid(alpha=0.25, which="both")
    if tried:
        axes.legend(fontsize=7, title="twin-int8, tried with", title_fontsize=7, markerscale=0)
    figure.savefig(path, dpi=160)


def main() -> None:
    arguments = measuring.parser(__doc__)
    arguments.add_argument("--model", default="smollm2:135m")
    arguments.add_argument("--kv-dtype", default="bf16")
    arguments.add_argument("--tokens", type=int, default=4096, help="to calibrate on")
    arguments.add_argument("--text-tokens", type=int, default=2048, help="to code")
    arguments.add_argument("--tried", action="store_true", help="also the twins that were tried and not kept")
    arguments.add_argument("--roundings", action="store_true", help="also ideal rates of ways to round activations")
    arguments.add_argument("--plot", type=Path)
    arguments = arguments.parse_args()
    dtype: DType = arguments.kv_dtype
    llm = LLM(arguments.model, threads=arguments.threads, kv_dtype="fp16" if dtype == "fp16" else "bf16")
    reference = llm.tokenizer.encode("\n\n".join(topics.values()))
    ids = reference[-arguments.text_tokens :]
    (text,) = kv_of_texts(llm, [ids], dtype, len(ids), len(ids))
    (short,) = kv_of_texts(llm, [reference], dtype, 1024, 1024)
    with sample(llm, reference[: -len(ids)], dtype, arguments.tokens) as calibration:
        rows = []
        for point in points(llm, calibration, arguments.tried):
            rows.append(measure(llm, point, text, dtype, arguments.runs))
            print(point.name, f"{rows[-1]['ratio']:.2f}", file=sys.stderr)  # it takes a quarter of an hour
    speed = prefill(llm, ids, arguments.runs)
    facts: dict[str, Any] = {"prefill tok/s": speed}
    if arguments.roundings:
        for row in ideal_rates(llm, short, text, dtype):
            facts[row["rounding of activations"]] = row["ideal bits a value"]
    title = f"{llm.name}, {dtype}, {len(ids)} tokens"
    if arguments.plot is not None:
        draw(rows, speed, f"{title}, {arguments.threads} threads", arguments.plot)
    measuring.report(f"predictors, {title}", rows, arguments, **facts)


if __name__ == "__main__":
    main()
