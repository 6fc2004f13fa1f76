"""The bodies of requests: their fields and JSON types. Ranges are checked where the values are used.

Fields that nobody knows are ignored, since clients send new ones before servers know them. Those that are known and not
supported are refused by name where ignoring them would change what comes out.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prolepsis.errors import InputError


class Body(BaseModel):
    """A body in which no value is taken for one of another type, and null is the default."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    refused: ClassVar[Mapping[str, tuple[object, str]]] = {}
    """Name -> the value that asks for nothing, beside null; and what to do instead."""
    within: ClassVar[str] = ""
    """What comes before names, for an object in a body."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (harmless, advice) in cls.refused.items():
            if body.get(name) not in (None, harmless):
                raise InputError(f"{cls.within}{name} is not supported; {advice}", field=f"{cls.within}{name}")
        return {name: value for name, value in body.items() if value is not None}


_LEAVE_OUT = "leave it out"
_USE_TOOLS = "use tools"
_USE_FORMS = "use a JSON Schema, a regex or a choice"


class StreamOptions(Body):
    """What a stream is to have beside the text."""

    include_usage: bool = False


class StructuredOutputs(Body):
    """One of its fields says what form an answer is to have."""

    within: ClassVar[str] = "structured_outputs."
    refused: ClassVar[Mapping[str, tuple[object, str]]] = {
        "grammar": ("", _USE_FORMS),
        "structural_tag": ("", _USE_FORMS),
        "whitespace_pattern": ("", _LEAVE_OUT),
        "disable_any_whitespace": (False, _LEAVE_OUT),
        "disable_additional_properties": (False, _LEAVE_OUT),
    }

    json_: Any = Field(None, alias="json")
    """A JSON Schema, parsed or as a text."""
    regex: str | None = None
    choice: list[Any] | None = None
    json_object: bool = False


class GenerationBody(Body):
    """What both kinds of completions can be asked for; without a comment here, as in `SamplingParams`."""

    refused: ClassVar[Mapping[str, tuple[object, str]]] = {
        "use_beam_search": (False, "use `prolepsis generate --beam-width`"),
        "min_tokens": (0, _LEAVE_OUT),
        "prompt_logprobs": (0, _LEAVE_OUT),
        "allowed_token_ids": ([], _LEAVE_OUT),
        "bad_words": ([], "use logit_bias"),
        "logits_processors": ([], _LEAVE_OUT),
        "truncate_prompt_tokens": (-1, "shorten the prompt"),
        "skip_special_tokens": (True, _LEAVE_OUT),
        "include_stop_str_in_output": (False, _LEAVE_OUT),
        "guided_grammar": ("", _USE_FORMS),
        "guided_whitespace_pattern": ("", _LEAVE_OUT),
    }

    model: str | None = None
    """The served one is meant where it is left out."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stop: Any = []
    """A text, or a list of texts."""
    stop_token_ids: list[Any] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    priority: int = 0
    """Lower is served first."""
    cache_salt: str = ""
    """Only requests with the same one share K and V."""
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | None = None
    """As `response_format` with a JSON Schema; this and the next three as vLLM has them."""
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    """Those three under vLLM's newer name."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options are for streams: set stream, or leave them out", field="stream_options")
        return self


class CompletionBody(GenerationBody):
    """/v1/completions."""

    refused: ClassVar[Mapping[str, tuple[object, str]]] = {**GenerationBody.refused, "suffix": ("", _LEAVE_OUT)}

    prompt: Any
    """A text, a list of texts, token ids, or a list of lists of these."""
    max_tokens: int = 16
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    """Whether the text begins with the prompt."""


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    refused: ClassVar[Mapping[str, tuple[object, str]]] = {
        **GenerationBody.refused,
        "functions": ([], _USE_TOOLS),
        "function_call": ("none", _USE_TOOLS),
        "audio": (None, _LEAVE_OUT),
        "modalities": (["text"], "answers are text"),
        "moderation": (None, _LEAVE_OUT),
        "web_search_options": (None, _LEAVE_OUT),
        "continue_final_message": (False, _LEAVE_OUT),
        "add_generation_prompt": (True, _LEAVE_OUT),
        "chat_template": (None, "the model's own is used"),
        "chat_template_kwargs": ({}, _LEAVE_OUT),
        "documents": ([], "put them into a message"),
    }

    messages: list[Any]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    """The older name; `max_completion_tokens` goes before it. Without either: as many as the context has room for."""
    logprobs: bool = False
    top_logprobs: int | None = None
    """Only with `logprobs`."""
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs needs logprobs to be true", field="top_logprobs")
        return self


class PromptOrMessages(Body):
    """What becomes tokens, and no more than that."""

    prompt: Any = None
    messages: list[Any] | None = None
    tools: list[Any] = []
    """What the model is told of beside messages."""

    @property
    def given(self) -> Literal["prompt", "messages"]:
        """Which of the two there is."""
        return "prompt" if self.messages is None else "messages"

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InputError("give either prompt or messages", field="prompt")
        return self


class TokenizeBody(PromptOrMessages):
    """/tokenize."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    """Whether a text gets the BOS token, where the model has one."""


class DetokenizeBody(Body):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]


class RestoreBody(Body):
    """/v1/sessions/{id}/restore, which needs none."""

    cache_salt: str = ""
    """That of the requests which the session came from and goes on with."""


class SessionBody(RestoreBody, PromptOrMessages):
    """/v1/sessions: what to keep. prompt: a text or token ids. tools: those of the requests that the session came from
    and goes on with."""

    id: str
