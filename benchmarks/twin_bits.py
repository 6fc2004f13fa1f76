"""What bits of weights buy a twin: coded KV of uniform twins, and of those whose bits are chosen under an average.

Calibrates on a text's first tokens and codes its next ones, which the model itself computes. Rates are those of whole
segments, without the profile. Beside each uniform twin stands the choice of as many bits a weight.
"""

from pathlib import Path
from typing import Any

import measuring
import numpy as np
from numpy.typing import NDArray

from prolepsis.coding import kv_array
from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans
from prolepsis.coding.rates import rate
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.target_cache import compute_kv
from prolepsis.coding.threads import limited_to
from prolepsis.coding.twin_calibration import calibrate_twin, fit_twin
from prolepsis.coding.twin_choice import ALL, chosen, mean_bits, measured, uniform
from prolepsis.coding.twin_network import MIXED, VARIANTS, Target, TwinNetwork
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.model.decoder import Decoder
from prolepsis.model.model_file import open_model

_WINDOW = 512
_DTYPE = "bf16"


def sample(target: Target, ids: list[int], rope: RopeSpec) -> CalibrationSample:
    """The KV of `ids`, in windows."""
    geometry = Geometry(_DTYPE, target.plan.layers, target.kv_heads, target.head_dim)
    made = CalibrationSample(geometry, rope, len(ids))
    for begin in range(0, len(ids), _WINDOW):
        window = np.array(ids[begin : begin + _WINDOW], np.uint32)
        kv = compute_kv(target, window, _DTYPE)
        for span in grid_spans(0, len(window)):
            stop = span.start + span.count
            made.add(Segment(span.start, span.count, window[span.start : stop]), kv_array.part(kv, span.start, stop))
    return made


def coded_bits(profile: TwinProfile, text: CalibrationSample) -> float:
    """Bits of a value."""
    coder = SegmentCoder(profile.geometry, profile, profile.rope)
    return 16 / rate(coder, text.parts(), text.chosen(None)).ratio


def main() -> None:
    arguments = measuring.parser(__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=2048, help="to calibrate on, and as many to code")
    arguments.add_argument("--bits", default="3,3.5,4,4.5,5,6,8")
    arguments = arguments.parse_args()
    model = open_model(arguments.model)
    config, tokens = model.config, arguments.tokens
    plan = Decoder.load(model, config, _WINDOW, 256, 1).plan
    target = Target(plan, config.num_kv_heads, config.head_dim, config.vocab_size)
    turned = config.rope
    rope = RopeSpec(turned.theta, turned.dim, "half", turned.scaling_factor, turned.frequency_factors)
    ids = model.tokenizer.encode(arguments.text.read_text()[: 40 * tokens])[: 2 * tokens]
    rows: list[dict[str, Any]] = []
    with (
        limited_to(arguments.threads),
        sample(target, ids[:tokens], rope) as calibration,
        sample(target, ids[tokens:], rope) as text,
    ):

        def fit(choice: NDArray[np.uint8]) -> TwinProfile:
            return fit_twin(calibration, TwinNetwork.mixed(target, choice), MIXED)

        facts = {name: coded_bits(calibrate_twin(calibration, target, name), text) for name in VARIANTS}
        for bits in map(float, arguments.bits.split(",")):
            start = uniform(target, bits)
            profile = fit(start)
            assert profile.network is not None
            costs = measured(calibration, profile.network, profile.corrections, start)
            weight = mean_bits(target, start)[ALL]
            rows.append({"bits": bits, "uniform": weight, "coded": coded_bits(profile, text)})
            for name, budget in (("chosen, as many", weight + 1e-9), ("chosen, all bits", bits)):
                choice = chosen(target, costs, budget)
                rows[-1] |= {name: mean_bits(target, choice)[ALL], f"coded, {name}": coded_bits(fit(choice), text)}
    measuring.report(f"bits of a twin's weights, {arguments.model.name}, {tokens} tokens", rows, arguments, **facts)


if __name__ == "__main__":
    main()
