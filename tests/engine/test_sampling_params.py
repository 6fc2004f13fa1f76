import dataclasses
import math
from dataclasses import replace

import pytest

from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", ["x"] * 17),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("max_tokens", 0),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop_token_ids", [5] * 1025),
        ("stop_token_ids", [1 << 31]),
        ("logit_bias", {1 << 64: 1.0}),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_value_out_of_range_names_its_field(field, value):
    with pytest.raises(InputError, match=f"^{field} must "):
        SamplingParams(**{field: value})


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=0, presence_penalty=-2, seed=0, logprobs=0, max_tokens=1)
    SamplingParams(
        top_p=1e-9, min_p=1, frequency_penalty=2, seed=(1 << 64) - 1, logprobs=20, logit_bias={0: -100, 1: 100}
    )


def test_one_stop_text_may_be_a_plain_string():
    assert SamplingParams(stop="END").stop == ("END",)


def test_parameters_do_not_change_after_they_were_checked():
    bias, stop = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1] = 1e9
    stop.append("")
    assert (params.logit_bias, params.stop) == ({1: 1.0}, ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 5  # type: ignore[misc]
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3


def test_defaults_sample_the_plain_distribution():
    params = SamplingParams()
    assert not params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias"])
def test_what_is_no_list_is_refused_by_name_and_none_is_an_empty_one(field: str) -> None:
    assert not getattr(SamplingParams(**{field: None}), field)
    with pytest.raises(InputError, match=f"{field} must .*not 5"):
        SamplingParams(**{field: 5})


def test_the_samples_of_a_prompt_differ_in_their_seeds_only():
    params = SamplingParams(seed=(1 << 64) - 1, n=2, logit_bias={7: 1.5, 3: -2.0}, stop_token_ids=[9])
    bias = params.bias
    assert (bias.tokens.tolist(), bias.values.tolist()) == ([7, 3], [1.5, -2.0])
    assert params.of_sample(0) == params
    assert params.of_sample(1) == replace(params, seed=0)
    assert params.of_sample(1).bias is bias
