"""A chat whose tokens stay in the cache from one question to the next."""

from collections.abc import Generator
from collections.abc import Sequence as Many

from prolepsis.engine.completion import Delta
from prolepsis.engine.llm import LLM
from prolepsis.engine.runner import Progress
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.model.chat_template import Message, encode_chat, encode_turn


class Conversation:
    """Messages, and the sequence that holds them as tokens. Each question computes its own tokens only.

    Between questions the sequence holds the prompt of the last question and the answer, without what ends it.
    """

    def __init__(self, llm: LLM, messages: Many[Message] = (), sequence: Sequence | None = None) -> None:
        """`sequence`: the tokens of `messages`, as an earlier conversation left them; empty for a new one."""
        self.llm = llm
        self.messages = [dict(message) for message in messages]
        self.sequence = sequence or llm.runner.new_sequence()

    def ask(
        self, question: str, params: SamplingParams, progress: Progress | None = None
    ) -> Generator[Delta, None, None]:
        """Put a question and stream the answer.

        The messages are updated as the iterator ends or is closed; an answer that is broken off counts as far as it
        came. If it fails or is closed before its first token, the conversation is as it was before. `progress` is
        called while the question is computed. Raises InputError if the conversation no longer fits the context.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._encode(messages)
        self.llm.check_prompt(prompt)
        return self._answer(messages, prompt, params, progress)

    def _answer(
        self,
        messages: list[dict[str, str]],
        prompt: list[int],
        params: SamplingParams,
        progress: Progress | None,
    ) -> Generator[Delta, None, None]:
        before = list(self.sequence.tokens)
        answer: list[str] = []
        try:
            self.sequence.replace(prompt)
            request = self.llm.new_request(self.sequence, params)
            for delta in self.llm.run(request, progress):
                answer.append(delta.text)
                yield delta
        finally:
            if answer:
                self._keep(messages, prompt, "".join(answer))
            else:
                self.sequence.replace(before)

    def _keep(self, messages: list[dict[str, str]], prompt: list[int], answer: str) -> None:
        """End a turn. Tokens of text that was not shown (a stop text, half a character) leave the sequence."""
        tokenizer = self.llm.tokenizer
        if tokenizer.decode(self.sequence.tokens[len(prompt) :], skip_special=False) != answer:
            self.sequence.replace([*prompt, *tokenizer.encode(answer, add_bos=False)])
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of `messages`: those of the sequence and the new turn's, where the template allows it."""
        llm = self.llm
        if self.messages and self.messages[-1]["role"] == "assistant" and self.sequence.tokens:
            turn = encode_turn(llm.tokenizer, llm.chat_template, messages, len(self.messages))
            if turn is not None:
                return [*self.sequence.tokens, *turn]
        return encode_chat(llm.tokenizer, llm.chat_template, messages)
