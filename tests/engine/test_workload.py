"""Random workloads: whatever is done to sequences, the cache stays sound and holds what a fresh pass would compute."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from test_conversation import kv, kv_in_one_go

from prolepsis import LLM, SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.session import load_session, save_session
from prolepsis.errors import CapacityError

NUM_BLOCKS = 24
TOKENS = st.lists(st.integers(0, 1023), min_size=1, max_size=300)


@pytest.mark.usefixtures("llm")
def test_random_workloads(tiny: Path, tiny_llm: LLM) -> None:
    small = LLM(tiny, kv_memory=NUM_BLOCKS * 32 * tiny_llm.kv_cache.bytes_per_token)
    assert small.kv_cache.pool.num_blocks == NUM_BLOCKS

    class Workload(RuleBasedStateMachine):
        """Sequences that come, grow, shrink, fork, leave the process and come back, in a cache that is often full."""

        def __init__(self) -> None:
            super().__init__()
            self.sequences: list[Sequence] = []

        def pick(self, choice: int) -> Sequence:
            return self.sequences[choice % len(self.sequences)]

        @rule(tokens=TOKENS)
        def begin(self, tokens: list[int]) -> None:
            sequence = small.runner.new_sequence(tokens)
            self.sequences.append(sequence)
            try:
                small.runner.prefill(sequence)
            except CapacityError:
                assert sequence.num_cached < len(tokens)

        @precondition(lambda self: self.sequences)
        @rule(choice=st.integers(0), count=st.integers(1, 40), seed=st.integers(0, 9), stop_after=st.integers(1, 40))
        def go_on(self, choice: int, count: int, seed: int, stop_after: int) -> None:
            """Generate, perhaps broken off, perhaps into a full cache."""
            sequence = self.pick(choice)
            params = SamplingParams(temperature=2.0, seed=seed, max_tokens=count)
            deltas = small.run(small.new_request(sequence, params))
            try:
                for _, _ in zip(range(stop_after), deltas, strict=False):
                    pass
            except CapacityError:
                assert small.kv_cache.pool.num_free < NUM_BLOCKS

        @precondition(lambda self: self.sequences)
        @rule(choice=st.integers(0), tokens=TOKENS, at=st.floats(0, 1))
        def replace(self, choice: int, tokens: list[int], at: float) -> None:
            sequence = self.pick(choice)
            kept = sequence.tokens[: int(at * len(sequence.tokens))]
            sequence.replace([*kept, *tokens])

        @precondition(lambda self: self.sequences)
        @rule(choice=st.integers(0), at=st.floats(0, 1))
        def truncate(self, choice: int, at: float) -> None:
            sequence = self.pick(choice)
            sequence.truncate(max(1, int(at * len(sequence.tokens))))

        @precondition(lambda self: self.sequences)
        @rule(choice=st.integers(0))
        def fork(self, choice: int) -> None:
            parent = self.pick(choice)
            self.sequences.append(Sequence(parent.table.fork(), parent.tokens))

        @precondition(lambda self: self.sequences)
        @rule(choice=st.integers(0))
        def release(self, choice: int) -> None:
            self.sequences.pop(choice % len(self.sequences)).release()

        @precondition(lambda self: any(sequence.num_cached for sequence in self.sequences))
        @rule(choice=st.integers(0))
        def save_and_restore(self, choice: int) -> None:
            cached = [sequence for sequence in self.sequences if sequence.num_cached]
            sequence = cached[choice % len(cached)]
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "s.pkv")
                save_session(path, small, sequence)
                try:
                    restored = load_session(path, small).sequence
                except CapacityError:
                    return
            assert restored.tokens == sequence.tokens
            assert np.array_equal(kv(small, restored), kv(small, sequence))
            self.sequences.append(restored)

        @rule()
        def complete_a_batch(self) -> None:
            used = small.kv_cache.pool.num_used
            try:
                small.generate([[1, 2, 3], [4] * 40], SamplingParams(temperature=0, max_tokens=5))
            except CapacityError:
                assert used > NUM_BLOCKS - 3
            assert small.kv_cache.pool.num_used == used

        @invariant()
        def the_cache_is_sound(self) -> None:
            small.kv_cache.check([sequence.table for sequence in self.sequences])

        def teardown(self) -> None:
            for sequence in self.sequences:
                held = sequence.tokens[: sequence.num_cached]
                if held:
                    assert np.array_equal(kv(small, sequence), kv_in_one_go(tiny_llm, held))
            for sequence in self.sequences:
                sequence.release()
            small.kv_cache.check([])

    run_state_machine_as_test(
        Workload,
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
