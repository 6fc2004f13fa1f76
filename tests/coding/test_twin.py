"""The twin: exact where it can be, the same bits however it is run, lossless whatever it is shown, worth its while."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twin_samples import ROPE, Model, Text, model

from prolepsis.coding import decode, encode
from prolepsis.coding.cache_dtypes import DType, Geometry, arrays_of, quantise
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.past import OwnPast, follow
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans, measure
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes, to_bytes
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.target_cache import compute_kv
from prolepsis.coding.threads import limited_to
from prolepsis.coding.twin_calibration import calibrate_twin
from prolepsis.coding.twin_network import REFERENCE, TwinNetwork
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import GROUPS, KV, MADE, QUERY, TARGETS

VARIANTS = ["twin-int4", "twin-int8", "twin-int8a16"]
TOKENS = 300


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model(tmp_path_factory.mktemp("model") / "mixed.gguf")


@pytest.fixture(scope="module")
def text(mixed: Model) -> Text:
    return mixed.text(3, TOKENS)


@pytest.fixture(scope="module")
def twins(mixed: Model) -> dict[str, TwinProfile]:
    return {variant: mixed.twin(variant) for variant in VARIANTS}


def predictions(profile: TwinProfile, text: Text, cuts: list[int]) -> np.ndarray:
    """Means of all layers and tokens, [layers, 2, tokens, kv_heads, head_dim], segment by segment."""
    predictor = profile.predictor(ROPE)
    past, parts = OwnPast(profile.geometry, 512), []
    for start, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        work, layers = predictor.begin(Segment(start, stop - start, text.ids[start:stop]), past), []
        for layer in range(profile.geometry.layers):
            prediction: Any = work.predict(range(layer, layer + 1))
            layers.append(prediction.means[0].copy())
            work.learn(np.ascontiguousarray(text.kv[layer : layer + 1, :, start:stop]), None)
        parts.append(np.stack(layers))
    return np.concatenate(parts, axis=2)


def bits(profile: Any, text: Text) -> float:
    """Ideal bits a scalar."""
    coder = SegmentCoder(Geometry.of(text.kv, "bf16"), profile, ROPE)
    parts = ((s, np.ascontiguousarray(text.kv[:, :, s.start : s.start + s.count])) for s in segments(text))
    total = sum(coder.ideal_bits(segment, kv, past).sum() for segment, kv, past in follow(coder.new_past, parts))
    return float(total) / text.kv.size


def segments(text: Text) -> list[Segment]:
    return [Segment(s.start, s.count, text.ids[s.start : s.start + s.count]) for s in grid_spans(0, TOKENS)]


def test_without_rounding_the_twin_is_the_target(mixed: Model, text: Text, twins: dict[str, TwinProfile]) -> None:
    """Through every kind of weight: what the engine stored is the prediction, rounded to the cache's dtype."""
    network = TwinNetwork.of(mixed.target, REFERENCE)
    nothing = np.zeros_like(twins["twin-int8"].corrections)
    exact = replace(twins["twin-int8"], network=network, corrections=nothing)
    assert np.array_equal(quantise(predictions(exact, text, [256]), "bf16"), text.kv)


def test_weights_are_the_targets_where_they_are_small_enough(mixed: Model) -> None:
    places = {}
    for variant in VARIANTS:
        profile = mixed.twin(variant).network
        assert profile is not None
        groups = profile.groups.reshape(-1, GROUPS, 5)
        assert (groups[:, KV, 2] == TARGETS).all()
        assert (groups[:, KV, 3] == 1).all()
        assert (groups[:, QUERY, 3] == (variant == "twin-int8a16")).all()
        places[variant] = groups[:, :, 2]
    assert (places["twin-int8"] == places["twin-int8a16"]).all()
    assert (places["twin-int4"] == MADE).sum() > (places["twin-int8"] == MADE).sum() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prediction_depends_on_its_token_and_past_alone(
    text: Text, twins: dict[str, TwinProfile], variant: str
) -> None:
    """Not on threads, nor on how tokens are cut into segments."""
    whole = predictions(twins[variant], text, [256])
    with limited_to(3):
        fresh = replace(twins[variant])  # whose workspaces have three threads
        assert np.array_equal(predictions(fresh, text, [1, 2, 60, 256, 299]), whole)
    with limited_to(1):
        assert np.array_equal(predictions(replace(twins[variant]), text, [150]), whole)


def test_more_bits_of_weights_and_activations_make_less_of_the_cache(text: Text, twins: dict[str, TwinProfile]) -> None:
    measured = [bits(twins[variant], text) for variant in VARIANTS]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] < bits(measure(text.kv, "bf16", ROPE), text)


def test_corrections_are_worth_their_while(text: Text, twins: dict[str, TwinProfile]) -> None:
    """Layer 0 follows from the token, and its errors, which are the cache's own rounding, say nothing of layer 1."""
    twin = twins["twin-int8"]
    without = replace(twin, corrections=np.zeros_like(twin.corrections))
    true = (text.kv.astype(np.uint32) << 16).view(np.float32)
    with_, none = (np.abs(predictions(p, text, [256]) - true).mean(axis=(1, 2, 3, 4)) for p in (twin, without))
    assert np.allclose(with_[:2], none[:2])
    assert with_[2] < 0.9 * none[2]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_every_dtype_comes_back(mixed: Model, text: Text, dtype: DType) -> None:
    kv = text.kv if dtype == "bf16" else quantise(text.kv, dtype)
    profile = mixed.twin("twin-int8", dtype)
    data = encode(kv, dtype=dtype, rope=ROPE, token_ids=text.ids.tolist(), profile=profile)
    assert all(map(np.array_equal, arrays_of(decode(data, profile=profile)), arrays_of(kv)))
    assert len(data) < sum(array.nbytes for array in arrays_of(kv))


def test_values_that_no_model_makes_come_back(text: Text, twins: dict[str, TwinProfile]) -> None:
    """All patterns: NaN, infinities, the largest numbers, in places where attention reads them."""
    kv = np.random.default_rng(0).integers(0, 1 << 16, text.kv.shape, np.uint16)
    kv[:, :, :40] = [0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F, 0x0001, 0x8000, 0x7F81] * 4
    for variant in VARIANTS:
        profile = twins[variant]
        data = encode(kv, dtype="bf16", rope=ROPE, token_ids=text.ids.tolist(), profile=profile)
        with limited_to(1):
            assert np.array_equal(decode(data, profile=replace(profile)), kv)


def test_a_profile_file(mixed: Model, text: Text, twins: dict[str, TwinProfile]) -> None:
    profile = twins["twin-int8"]
    data = to_bytes(CalibratedProfile(profile, profile.geometry, ROPE, {"file": "x"}, 600))
    read = from_bytes(data, "p").profile
    assert isinstance(read, TwinProfile)
    assert read.fingerprint == profile.fingerprint
    with pytest.raises(InputError, match="needs the model"):
        read.predictor(ROPE)
    coded = encode(text.kv, dtype="bf16", rope=ROPE, token_ids=text.ids.tolist(), profile=profile)
    assert np.array_equal(decode(coded, profile=read.bound_to(mixed.target)), text.kv)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("corrections", lambda array: array[..., :-1]),
        ("corrections", lambda array: array.astype(np.int16)),
        ("codes", lambda array: array[:2]),
        ("codes", lambda array: array + np.uint16(2040)),
        ("frequencies", lambda array: array + np.uint16(1)),
        ("frequencies", lambda array: array.astype(np.float32)),
    ],
)
def test_a_profile_file_with_arrays_that_are_none(twins: dict[str, TwinProfile], field: str, change: Any) -> None:
    profile = twins["twin-int8"]
    changed = replace(profile, **{field: np.ascontiguousarray(change(getattr(profile, field)))})
    data = to_bytes(CalibratedProfile(changed, profile.geometry, ROPE, {}, 600))
    with pytest.raises(InputError, match="p is not a sound profile file"):
        from_bytes(data, "p")


def test_corrections_that_are_no_numbers_cost_bytes_and_nothing_else(text: Text, twins: dict[str, TwinProfile]) -> None:
    broken = replace(twins["twin-int8"], corrections=np.full_like(twins["twin-int8"].corrections, 0x7C))
    data = encode(text.kv, dtype="bf16", rope=ROPE, token_ids=text.ids.tolist(), profile=broken)
    assert np.array_equal(decode(data, profile=broken), text.kv)


@pytest.mark.parametrize("rows", [0, 64, 288])
def test_a_profile_of_another_shape_than_its_network(mixed: Model, twins: dict[str, TwinProfile], rows: int) -> None:
    """Corrections are multiplied into memory that is as large as the model's hidden state."""
    profile = twins["twin-int8"]
    columns = profile.corrections.shape[2]
    wrong = replace(profile, corrections=np.zeros((2, rows, columns), np.uint8))
    read = from_bytes(to_bytes(CalibratedProfile(wrong, profile.geometry, ROPE, {}, 600)), "p").profile
    for damaged in (read, replace(profile, geometry=profile.geometry._replace(layers=4))):
        assert isinstance(damaged, TwinProfile)
        with pytest.raises(InputError, match="the profile is damaged: it speaks of the shape"):
            damaged.bound_to(mixed.target)


def test_what_is_refused(mixed: Model, text: Text, twins: dict[str, TwinProfile], tmp_path: Path) -> None:
    profile = twins["twin-int8"]
    predictor, past = profile.predictor(ROPE), OwnPast(profile.geometry, 512)
    with pytest.raises(InputError, match="needs token ids"):
        predictor.begin(Segment(0, 4), past)
    with pytest.raises(InputError, match="beyond the 500 tokens"):
        predictor.begin(Segment(0, 1, np.array([500], np.uint32)), past)
    with pytest.raises(InputError, match="needs all 256 tokens before the segment, and knows 0"):
        predictor.begin(Segment(256, 4, text.ids[:4]), past)
    past.append(np.zeros((3, 2, 512, 2, 32), np.uint16))
    with pytest.raises(InputError, match="position 512 is beyond the 512 positions"):
        predictor.begin(Segment(512, 1, text.ids[:1]), past)
    with pytest.raises(InputError, match="calibrated for RopeSpec"):
        profile.predictor(None)
    with pytest.raises(InputError, match="weights of another model"):
        profile.bound_to(model(tmp_path / "other.gguf", "Q8_0").target)
    with (
        CalibrationSample(profile.geometry, ROPE, 4) as sample,
        pytest.raises(InputError, match="no tokens"),
    ):
        calibrate_twin(sample, mixed.target, "twin-int8")
    with CalibrationSample(profile.geometry, ROPE, 4) as sample:
        sample.add(Segment(0, 4), text.kv[:, :, :4])
        with pytest.raises(InputError, match="ids are known"):
            calibrate_twin(sample, mixed.target, "twin-int8")


def test_an_open_loop_is_worth_less(mixed: Model, text: Text, twins: dict[str, TwinProfile]) -> None:
    """The published method, at the same precision; what it attends to, it can decode with too."""
    with mixed.sample() as sample:
        opened = calibrate_twin(sample, mixed.target, "twin-int8", open_loop=True)
    assert bits(opened, text) > 1.02 * bits(twins["twin-int8"], text)
    data = encode(text.kv, dtype="bf16", rope=ROPE, token_ids=text.ids.tolist(), profile=opened)
    assert np.array_equal(decode(data, profile=opened), text.kv)


def test_kv_of_other_caches(mixed: Model, text: Text) -> None:
    """The engine's own where it has such a cache; and attention reads what is stored, not what was computed."""
    kv = compute_kv(mixed.target, text.ids, "bf16")
    assert np.array_equal(arrays_of(kv)[0], text.kv)
    for dtype in ("fp8_e4m3", "int4"):
        own, rounded = compute_kv(mixed.target, text.ids, dtype), quantise(text.kv, dtype)
        alike = (arrays_of(own)[0] == arrays_of(rounded)[0]).mean(axis=(1, 2, 3, 4))
        assert alike[0] > 0.95  # what is the same is rounded once here, and twice there
        assert (alike[1:] < 0.9).all()
