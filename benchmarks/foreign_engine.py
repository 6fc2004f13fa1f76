"""A twin on the KV of another engine: `transformers`, which computes the same weights in bf16.

Its roundings are noise that no predictor can know, and nobody tells the twin its hidden states: corrections aim at
those of our own arithmetic. Calibrates on Python's language reference and codes its last pages. Needs the extra `test`.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import measuring
import numpy as np
import torch
from numpy.typing import NDArray
from reference import load_reference

from prolepsis import LLM
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.kv_array import part
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans, measure
from prolepsis.coding.rates import rate
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.twin_calibration import calibrate_twin
from prolepsis.engine.identity import geometry
from prolepsis.engine.profiles import target_of

_WINDOW = 2048


def bf16_model(path: Path) -> Any:
    """LlamaForCausalLM in bf16; the frequencies of RoPE stay in float32, as wherever it is loaded in bf16."""
    model = load_reference(path)
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    model = model.to(torch.bfloat16)
    rotary.inv_freq = frequencies
    return model


@torch.no_grad()
def foreign_kv(model: Any, ids: list[int]) -> NDArray[np.uint16]:
    """bf16 bits, [layers, 2, tokens, kv_heads, head_dim]."""
    cache = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    pairs = [torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2) for layer in cache.layers]
    return torch.stack(pairs).contiguous().view(torch.int16).numpy().view(np.uint16)


def segments(ids: list[int], kv: KV) -> Iterator[tuple[Segment, KV]]:
    """Of one text."""
    for span in grid_spans(0, len(ids)):
        stop = span.start + span.count
        yield Segment(span.start, span.count, np.array(ids[span.start : stop], np.uint32)), part(kv, span.start, stop)


def main() -> None:
    arguments = measuring.parser(__doc__)
    arguments.add_argument("--model", default="smollm2:135m")
    arguments.add_argument("--windows", type=int, default=2, help=f"of {_WINDOW} tokens to calibrate on")
    arguments = arguments.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(arguments.model, threads=arguments.threads)
    foreign = bf16_model(llm.path)
    ids, rope, shape = llm.tokenizer.encode("\n\n".join(topics.values())), llm.rope, geometry(llm, "bf16")
    text = list(segments(ids[-_WINDOW:], foreign_kv(foreign, ids[-_WINDOW:])))
    whole = np.concatenate([kv for _, kv in text], axis=2)
    rows = [{"predictor": "static", "ratio": rate(SegmentCoder(shape, measure(whole, "bf16", rope), rope), text).ratio}]
    with CalibrationSample(shape, rope, arguments.windows * _WINDOW) as sample:
        for first in range(0, arguments.windows * _WINDOW, _WINDOW):
            window = ids[first : first + _WINDOW]
            for segment, kv in segments(window, foreign_kv(foreign, window)):
                sample.add(segment, kv)
        for variant in ("twin-int8", "twin-int8a16"):
            for open_loop in (False, True):
                profile = calibrate_twin(sample, target_of(llm), variant, open_loop=open_loop)
                name = f"{variant}, {'open' if open_loop else 'closed'} loop"
                rows.append({"predictor": name, "ratio": rate(SegmentCoder(shape, profile, rope), text).ratio})
    ours = llm.runner.new_sequence(ids[-_WINDOW:])
    llm.runner.prefill(ours)
    same = float((llm.kv_cache.read(ours.table, 0, _WINDOW) == whole).mean())
    measuring.report(
        f"KV of transformers in bf16, {arguments.model}, {_WINDOW} tokens", rows, arguments, same_bits_as_ours=same
    )


if __name__ == "__main__":
    main()
