"""A chat whose tokens stay in the cache from one question to the next."""

from collections.abc import Generator
from collections.abc import Sequence as Many

from prolepsis.engine.llm import LLM
from prolepsis.engine.request import Delta, Request
from prolepsis.engine.runner import Progress
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.model.chat_template import Message, encode_chat, encode_turn


class Conversation:
    """Messages, and the sequence that holds them as tokens. Each question computes its own tokens only."""

    def __init__(self, llm: LLM, messages: Many[Message] = (), sequence: Sequence | None = None) -> None:
        """`sequence`: the tokens of `messages`, as an earlier conversation left them; empty for a new one."""
        self.llm = llm
        self.messages = [dict(message) for message in messages]
        self.sequence = sequence or llm.runner.new_sequence()

    def ask(
        self, question: str, params: SamplingParams, progress: Progress | None = None
    ) -> Generator[Delta, None, None]:
        """Put a question and stream the answer; the messages are updated as the iterator ends or is closed.

        Raises InputError if the conversation no longer fits the context; it is then as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        before = list(self.sequence.tokens)
        self._extend(messages)
        try:
            request = self.llm.new_request(self.sequence, params)
        except Exception:
            self.sequence.truncate(_common_prefix(self.sequence.tokens, before))
            self.sequence.tokens[:] = before
            raise
        return self._answer(messages, request, progress)

    def _answer(
        self, messages: list[dict[str, str]], request: Request, progress: Progress | None
    ) -> Generator[Delta, None, None]:
        text = ""
        try:
            for delta in self.llm.run(request, progress):
                text += delta.text
                yield delta
        finally:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _extend(self, messages: list[dict[str, str]]) -> None:
        """Bring the sequence's tokens up to date with `messages`, keeping what is cached of them."""
        llm = self.llm
        turn = None
        if self.messages and self.messages[-1]["role"] == "assistant" and self.sequence.tokens:
            turn = encode_turn(llm.tokenizer, llm.chat_template, messages, len(self.messages))
        if turn is not None:
            self.sequence.tokens.extend(turn)
            return
        tokens = encode_chat(llm.tokenizer, llm.chat_template, messages)
        self.sequence.truncate(_common_prefix(self.sequence.tokens, tokens))
        self.sequence.tokens[:] = tokens


def _common_prefix(first: Many[int], second: Many[int]) -> int:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))
