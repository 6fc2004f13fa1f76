"""Mixed twins: the choice is worth what was measured, is kept in profiles, and gives the same bits to whoever reads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twin_samples import ROPE, Model, model

from prolepsis.coding import decode, encode
from prolepsis.coding.profile_file import CalibratedProfile, from_bytes, to_bytes
from prolepsis.coding.twin_calibration import fit_twin
from prolepsis.coding.twin_choice import ALL, calibrate_mixed, chosen, mean_bits, measured, things, uniform
from prolepsis.coding.twin_network import MIXED, VARIANTS, TwinNetwork
from prolepsis.coding.twin_options import OWN, PRODUCTS, ROUNDINGS
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import GROUPS, MADE

BITS = 4.25


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model(tmp_path_factory.mktemp("model") / "bf16.gguf", "BF16")


@pytest.fixture(scope="module")
def profile(wide: Model) -> TwinProfile:
    with wide.sample() as sample:
        return calibrate_mixed(sample, wide.target, BITS)


def saved(profile: TwinProfile) -> bytes:
    return to_bytes(CalibratedProfile(profile, profile.geometry, ROPE, {}, 600))


def test_the_choice_costs_no_more_than_a_uniform_one(wide: Model) -> None:
    """By the costs that were measured, of which more bits take off and fewer add."""
    what, start = things(wide.target), uniform(wide.target, BITS)
    assert [len(thing.options) for thing in what] == [1 + len(ROUNDINGS)] * 8
    network = TwinNetwork.mixed(wide.target, start)
    with wide.sample() as sample:
        costs = measured(sample, network, fit_twin(sample, network, MIXED).corrections, start)

    def cost(choice: np.ndarray) -> float:
        taken = (thing.options.index(choice[thing.layer, thing.column]) for thing in what)
        return sum(each[option] for each, option in zip(costs, taken, strict=True))

    assert cost(start) == 0
    for thing, each in zip(what, costs, strict=True):
        assert each[thing.options.index(1)] > 0 > each[thing.options.index(10)]
    for bits in (2.5, 3.3, BITS, 6.0, 9.0):
        choice, same = chosen(wide.target, costs, bits), uniform(wide.target, bits)
        assert mean_bits(wide.target, choice)[ALL] <= bits
        assert cost(choice) <= cost(same)
        assert not choice[-1].any()  # no prediction depends on what the last layer makes of its K and V


def test_the_twin_has_what_was_chosen(profile: TwinProfile, wide: Model) -> None:
    assert profile.network is not None
    assert profile.choice is not None
    places = profile.network.groups.reshape(-1, GROUPS, 5)[:, PRODUCTS, 2]
    assert np.array_equal(places == MADE, profile.choice != OWN)
    assert 4 < mean_bits(wide.target, profile.choice)[ALL] <= BITS


def test_whoever_has_the_profile_decodes(profile: TwinProfile, wide: Model) -> None:
    ids, kv = wide.text(3, 300)
    read = from_bytes(saved(profile), "p").profile
    assert isinstance(read, TwinProfile)
    assert (read.fingerprint, read.predictor_name) == (profile.fingerprint, "twin-mixed/1")
    data = encode(kv, dtype="bf16", rope=ROPE, token_ids=ids.tolist(), profile=profile)
    assert np.array_equal(decode(data, profile=read.bound_to(wide.target)), kv)


def test_another_choice_is_another_network(profile: TwinProfile, wide: Model) -> None:
    assert profile.choice is not None
    choice = profile.choice.copy()
    choice[0, 0] = OWN
    other = replace(profile, choice=choice)
    assert other.fingerprint != profile.fingerprint
    with pytest.raises(InputError, match="weights of another model"):
        from_bytes(saved(other), "p").profile.bound_to(wide.target)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("choice", "fault"),
    [
        (np.full((3, 4), 11, np.uint8), "an option that this version does not know"),
        (np.full((3, 4), 255, np.uint8), "an option that this version does not know"),
        (np.zeros((2, 4), np.uint8), r"choice is uint8 \(2, 4\), expected uint8 \(3, 4\)"),
        (np.zeros((3, 4), np.int8), "choice is int8"),
        (np.zeros((3, 400), np.uint8), "choice is uint8"),
        (None, "arrays that differ"),
    ],
)
def test_choices_that_are_none(profile: TwinProfile, choice: np.ndarray | None, fault: str) -> None:
    with pytest.raises(InputError, match=f"p is not a sound profile file: .*{fault}"):
        from_bytes(saved(replace(profile, choice=choice)), "p")


def test_a_uniform_twin_with_a_choice_is_refused(profile: TwinProfile) -> None:
    with pytest.raises(InputError, match="arrays that differ"):
        from_bytes(saved(replace(profile, variant="twin-int8")), "p")


def test_a_choice_of_another_number_of_layers(profile: TwinProfile, wide: Model) -> None:
    choice = np.zeros((4, 4), np.uint8)
    with pytest.raises(InputError, match="a choice for 4 layers does not fit a model of 3"):
        replace(profile, choice=choice).bound_to(wide.target)


def test_small_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    """Then nothing differs from `twin-int8`."""
    small = model(tmp_path / "q4.gguf", "Q4_1")
    with small.sample() as sample:
        mixed = calibrate_mixed(sample, small.target, 5.0)
        with pytest.raises(InputError, match=r"takes at least 2\.39 bits a weight, and is to have 2\.3"):
            calibrate_mixed(sample, small.target, 2.3)
    assert mixed.is_as_target
    assert mixed.network_is == TwinNetwork.of(small.target, VARIANTS["twin-int8"]).fingerprint
    assert np.array_equal(mixed.corrections, small.twin("twin-int8").corrections)
