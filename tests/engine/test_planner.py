"""The planner: whichever is faster, by guesses at first and by what was measured then."""

import pytest

from prolepsis.engine.planner import Piece, Planner
from prolepsis.engine.restore_plan import RestorePlan

TOKEN_BYTES, MODEL_BYTES = 23_040, 100_000_000


@pytest.fixture
def planner() -> Planner:
    return Planner(TOKEN_BYTES, MODEL_BYTES)


def pieces(tier: str = "disk", count: int = 16) -> list[Piece]:
    return [Piece(tier, tier, 4_000_000, 256)] * count


def test_without_measurements_a_large_model_is_restored_from_any_tier(planner: Planner) -> None:
    for tier in ("memory", "disk", "redis", "remote", "some kind of later"):
        large = Planner(TOKEN_BYTES, 100 * MODEL_BYTES)
        plan = large.decide(300, pieces(tier), "static")
        assert (plan.reason, plan.pool_tokens, plan.stored_tokens) == ("restore_is_faster", 300, 16 * 256)
        assert plan.restore_s is not None
        assert plan.recompute_s is not None
        assert 0 < plan.restore_s < plan.recompute_s
        assert f"{1000 * plan.restore_s:.0f} ms" in plan.explanation


def test_nothing_stored_is_nothing_restored(planner: Planner) -> None:
    assert planner.decide(5, [], "static") == RestorePlan("nothing_stored", 5)


def test_a_look_up_that_takes_longer_than_computing_is_skipped_until_it_may_be_faster(planner: Planner) -> None:
    kinds = ("memory", "remote")
    assert planner.skip_look_up(0, 4096, kinds) is None
    skipped = planner.skip_look_up(5, 10, kinds)
    assert skipped is not None
    assert (skipped.reason, skipped.pool_tokens, skipped.stored_tokens) == ("recompute_is_faster", 5, 0)
    for _ in range(30):
        planner.asked(0.001, kinds)
    assert planner.skip_look_up(5, 1000, kinds) is None
    for _ in range(60):
        planner.asked(15.0, kinds)  # it hangs
    assert planner.skip_look_up(5, 1000, kinds) is not None
    for _ in range(200):
        planner.skip_look_up(5, 1000, kinds)
    assert planner.skip_look_up(5, 1000, kinds) is None


def test_a_slow_tier_is_found_out(planner: Planner) -> None:
    assert planner.decide(0, pieces(), "static").reason == "restore_is_faster"
    planner.fetched("disk", "disk", 4_000_000, 4.0)
    plan = planner.decide(0, pieces(), "static")
    assert plan.reason == "recompute_is_faster"
    assert plan.restore_s == pytest.approx(16 * 4.0, rel=0.05)
    for _ in range(30):
        planner.fetched("disk", "disk", 4_000_000, 0.01)
    assert planner.decide(0, pieces(), "static").reason == "restore_is_faster"
    for _ in range(30):
        planner.fetched("disk", "disk", 100, 5.0)
    assert planner.tier_speed("disk", "disk").latency == pytest.approx(5.0, rel=0.01)
    assert planner.decide(0, pieces(), "static").reason == "recompute_is_faster"


def test_fast_computing_and_slow_decoding_are_found_out(planner: Planner) -> None:
    planner.prefilled(1000, 0.001, first=True)
    assert planner.decide(0, pieces(), "static").reason == "recompute_is_faster"
    for _ in range(40):
        planner.prefilled(100, 10.0)
    assert planner.prefill_s == pytest.approx(0.1, rel=0.01)
    assert planner.decide(0, pieces(), "static").reason == "restore_is_faster"
    assert planner.is_worth("linear")
    for _ in range(30):
        planner.decoded("linear", 100, 20.0)
    assert planner.decode_s("linear") == pytest.approx(0.2, rel=0.01)
    assert not planner.is_worth("linear")
    assert planner.decide(0, pieces(), "linear").reason == "recompute_is_faster"
    assert planner.decide(0, pieces(), "static").reason == "restore_is_faster"


def test_a_decoding_that_compiled_does_not_end_all_restores(planner: Planner) -> None:
    planner.prefilled(256, 1.0, first=True)
    planner.decoded("static", 256, 35.0)
    assert planner.decide(0, pieces(), "static").reason == "restore_is_faster"
    for _ in range(30):
        planner.decoded("static", 256, 0.02)
    assert planner.decode_s("static") == pytest.approx(0.02 / 256, rel=0.01)


def test_what_was_slow_once_is_tried_again(planner: Planner) -> None:
    planner.fetched("disk", "disk", 4_000_000, 4.0)
    planner.fetched("disk", "disk", 100, 3.0)
    for _ in range(20):
        planner.decoded("static", 256, 100.0)
    refusals = 0
    while (plan := planner.decide(0, pieces(), "static")).reason == "recompute_is_faster":
        assert plan == planner.decide(0, pieces(), "static")  # to ask changes nothing
        planner.refused(pieces(), "static")
        refusals += 1
    assert 20 < refusals < 1000
