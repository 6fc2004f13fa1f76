"""This engine, to be measured; see `measure.Engine` for the methods."""

from collections.abc import Generator, Sequence

from prolepsis.bench.engines import Setup
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams


class Prolepsis:
    """This engine with its own defaults."""

    precision, draft = "high", "none"

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(
            setup.model,
            threads=setup.threads,
            max_context=setup.context,
            precision=self.precision,
            draft=self.draft,
        )
        self._sequence = self._llm.runner.new_sequence()

    def answer(self, prompt: Sequence[int]) -> Generator[int, None, None]:
        """See `measure.Answering`."""
        self._sequence.release()
        self._sequence = self._llm.runner.new_sequence(prompt)
        most = self._llm.max_context - len(prompt)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        for delta in self._llm.run(self._llm.new_request(self._sequence, params)):
            yield delta.token.token

    def prefill(self, tokens: Sequence[int]) -> None:
        self._sequence.release()
        self._sequence = self._llm.runner.new_sequence(tokens)
        self._llm.runner.prefill(self._sequence)

    def decode(self, token: int) -> None:
        self._sequence.tokens.append(token)
        self._llm.runner.step([self._sequence])

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self._sequence.release()
        self._llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))


class Fast(Prolepsis):
    """This engine with activations of 8 bits, as its peers have."""

    precision = "fast"


class Ngram(Prolepsis):
    """This engine with drafts looked up in the text so far."""

    draft = "ngram"


class FastNgram(Fast):
    """Both."""

    draft = "ngram"
