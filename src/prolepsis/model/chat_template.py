"""Conversations to prompts: a model's own chat template, and token ids no message can forge.

The template writes control tokens by name into one text. Encoding that text as a whole would also make control
tokens of names that stand in a message, so a user could end their turn and speak as the system. Before rendering,
`_Shield` therefore replaces one character of every such name in a message by a stand-in from Unicode's private
use area; after the text is cut at the control tokens that are left, which are the template's own, the
characters come back. Where no message spells a control token nothing is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prolepsis.errors import InputError, ModelFileError
from prolepsis.model.conversation_limits import check_messages, strings
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.model.tool_prompt import spoken

if TYPE_CHECKING:
    from jinja2 import Template

    from prolepsis.model.template_sandbox import BoundedEnvironment

Message = Mapping[str, Any]
"""`role` and `content`, texts; a role may add `name`, `tool_call_id` and `tool_calls` as in OpenAI's API."""
Tools = Sequence[Mapping[str, Any]]
"""Each {"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON Schema}}."""

# Used for a file without a template whose vocabulary has these two control tokens.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

# What a template may write: each character of a conversation some times, around each message, and by itself. To encode
# it takes seconds for a million characters.
MAX_REPEATS, MAX_AROUND, MAX_OWN = 4, 1 << 10, 1 << 20
# Names that templates look for. No model has control tokens that are called so.
_STRUCTURE = frozenset(
    (
        *("role", "content", "name", "tool_call_id", "tool_calls", "id", "type", "function", "arguments"),
        *("description", "parameters", "properties", "required", "items", "enum", "default", "title", "anyOf"),
    )
)
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))


class ChatTemplate:
    """A Jinja template that turns messages into the text of a prompt."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Nothing is compiled before the first rendering, so a broken template harms nobody who does not chat."""
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    @staticmethod
    def from_gguf(file: GGUFFile) -> ChatTemplate:
        """The template of `file`; ChatML where it has none but the vocabulary has ChatML's tokens.

        Raises:
            ModelFileError: there is no template, and none can be assumed.
        """
        source = file.metadata.get("tokenizer.chat_template")
        tokens = file.metadata.get("tokenizer.ggml.tokens", [])
        return ChatTemplate.of(
            source, str(file.path), tokens, _token(file, "bos_token_id"), _token(file, "eos_token_id")
        )

    @staticmethod
    def of(source: object, path: str, tokens: Container[str], bos_token: str, eos_token: str) -> ChatTemplate:
        """The template `source` of the model at `path`, or what can be assumed where that is None.

        Raises:
            ModelFileError: as `from_gguf`.
        """
        if source is None and all(token in tokens for token in _CHATML_TOKENS):
            source = CHATML
        if not isinstance(source, str):
            raise ModelFileError(
                f"{path}: the model has no chat template (tokenizer.chat_template), so it cannot chat; "
                "generate from a prompt instead"
            )
        return ChatTemplate(source, bos_token, eos_token)

    @cached_property
    def _compiled(self) -> tuple[BoundedEnvironment, Template]:
        from prolepsis.model.template_sandbox import BoundedEnvironment

        environment = BoundedEnvironment()
        return environment, environment.compile_bounded(self.source)

    @property
    def uses_tools(self) -> bool:
        """Whether it tells the model of tools; where it does not, they are told in words (`tool_prompt`)."""
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> str:
        """The prompt's text; with `add_generation_prompt` it ends where the assistant begins to speak.

        Raises:
            InputError: a message is not as `Message` says, the conversation is too long, or the template fails, refuses
                the conversation or exceeds a limit of its sandbox.
        """
        limit = MAX_REPEATS * check_messages(messages, tools) + MAX_AROUND * len(messages) + MAX_OWN
        if not self.uses_tools:
            messages, tools = spoken(messages, tools), None
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        try:
            environment, template = self._compiled
            text = environment.render_bounded(template, variables)
        except Exception as error:
            # The template is a program out of the model file; whatever it raises is a fault of that file.
            raise InputError(f"chat template: {error or type(error).__name__}") from error
        if len(text) > limit:
            raise InputError(f"chat template: writes {len(text)} characters for this conversation, at most {limit}")
        return text


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Tools | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of the rendered conversation, with control tokens from the template alone.

    The BOS token comes first where the model asks for it and the template has not written it. `max_tokens`: give up on
    what is certain to have more.

    Raises:
        InputError: as `ChatTemplate.render`, `Tokenizer.encode` and `Tokenizer.require_at_most`.
    """
    shield = _Shield(tokenizer, template, messages, tools)
    text = template.render(shield.messages, add_generation_prompt=add_generation_prompt, tools=shield.tools)
    if max_tokens is not None:
        tokenizer.require_at_most(max_tokens, text)
    ids = list(shield.encode(text))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def encode_turn(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], start: int
) -> list[int] | None:
    """Token ids to append to a cached conversation so that the model can answer its new messages.

    The cache holds `encode_chat(messages[:start - 1])`, or what earlier calls of this function have made of it,
    followed by the ids generated for the answer `messages[start - 1]`, without the token that ended it.
    `messages[start:]` are new. The result closes the answer, holds the new messages and opens the next answer,
    e.g. `<|im_end|>\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n`: what the template writes for
    all messages is the text of the cache followed by the text of the result.

    Returns None where that cannot be, since the template writes earlier messages differently once there are
    more (it trims answers, say, or drops their reasoning): encode the whole conversation again.

    Raises:
        InputError: `messages[start - 1]` is not the assistant's, or as `encode_chat`.
    """
    check_messages(messages)
    if not 1 <= start < len(messages):
        raise InputError(f"start = {start}, expected 1 to {len(messages) - 1}: an answer, then new messages")
    if messages[start - 1]["role"] != "assistant":
        raise InputError(
            f"message {start - 1} is by {messages[start - 1]['role']!r}, expected the cached assistant's answer"
        )
    shield = _Shield(tokenizer, template, messages)
    cached = template.render(shield.messages[: start - 1]) + shield.messages[start - 1]["content"]
    text = template.render(shield.messages)
    return list(shield.encode(text[len(cached) :])) if text.startswith(cached) else None


def _token(file: GGUFFile, key: str) -> str:
    """Text of the token that `key` points to; empty where the file has no such token."""
    tokens, index = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get(f"tokenizer.ggml.{key}")
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else ""


class _Shield:
    """Messages and tools in which no control token's name is left, and the way back.

    Besides whole names, the end of a name at a message's beginning and the beginning of a name at its end are
    broken up (whitespace outside them aside, which templates trim): the template might join them.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], tools: Tools | None = None
    ) -> None:
        check_messages(messages, tools)
        names = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._starts = re.compile(f"(?={'|'.join(map(re.escape, names))})") if names else None
        self._tails = {name[i:] for name in names for i in range(1, len(name))}
        self._heads = {name[:i] for name in names for i in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        taken = set(template.source).union(*names, *strings([messages, tools]))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        self._hide = dict(zip(sorted(set().union(*names)), free, strict=False))
        self._reveal = str.maketrans({stand_in: character for character, stand_in in self._hide.items()})
        self.messages: list[Message] = self._protected(list(messages))
        self.tools: Tools | None = self._protected(None if tools is None else list(tools))

    def encode(self, text: str) -> Iterator[int]:
        """Ids of text rendered from `messages`."""
        for index, part in enumerate(self._tokenizer.split_special(text, parse_special=True)):
            if isinstance(part, int):
                yield part
            else:
                revealed = part.translate(self._reveal)
                yield from self._tokenizer.encode(revealed, add_bos=False, continues=index > 0)

    def _protected(self, value: Any) -> Any:
        """A JSON value with every text in it protected, the names of fields too."""
        if isinstance(value, str):
            return self._protect(value)
        if isinstance(value, Mapping):
            return {
                key if key in _STRUCTURE else self._protect(key): self._protected(each) for key, each in value.items()
            }
        return [self._protected(each) for each in value] if isinstance(value, list | tuple) else value

    def _protect(self, text: str) -> str:
        at = {match.start() for match in self._starts.finditer(text)} if self._starts else set()
        at.update(self._cut_names(text))
        if not at:
            return text
        characters = list(text)
        for index in at:
            characters[index] = self._hide[characters[index]]
        return "".join(characters)

    def _cut_names(self, text: str) -> Iterable[int]:
        """Where the rest of a name stands at the beginning of `text`, or the beginning of one at its end."""
        first = len(text) - len(text.lstrip())
        last = len(text.rstrip())
        for length in range(1, self._longest):
            if text[first : first + length] in self._tails:
                yield first
            if text[max(first, last - length) : last] in self._heads:
                yield max(first, last - length)
