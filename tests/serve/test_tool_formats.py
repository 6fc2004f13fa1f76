"""Grammars of tool calls: whatever a model would rather say, what comes out is read as calls with valid arguments."""

import json
from typing import Any

import numpy as np
import pytest

from prolepsis import SamplingParams
from prolepsis.engine.grammar import Grammar
from prolepsis.engine.matching import GrammarCompiler
from prolepsis.engine.sampler import Sampler
from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.tokenizer import CONTROL, Tokenizer, from_metadata
from prolepsis.model.tool_prompt import CALL, CALL_END
from prolepsis.serve.tool_formats import Tool, ToolFormat, tool_format
from prolepsis.serve.tool_parser import ARGS, PYTHON_TAG, TOOL_CALLS, ToolParser
from prolepsis.serve.tool_reader import Call, Text

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Seoul", 'a"b', "Zürich"]}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", CITY, True), Tool("a.b-c", NOTHING, False))


@pytest.fixture(scope="module")
def tokenizers(tiny) -> dict[bool, Tokenizer]:
    """Without the markers of calls among the control tokens, and with them."""
    metadata = GGUFFile.open(tiny).metadata
    markers = [CALL, CALL_END, TOOL_CALLS, ARGS, PYTHON_TAG]
    tokens = metadata["tokenizer.ggml.tokens"] + markers
    types = metadata["tokenizer.ggml.token_type"] + [CONTROL] * len(markers)
    marked = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return {False: from_metadata(metadata), True: from_metadata(marked)}


def sampled(tokenizer: Tokenizer, grammar: Grammar, seed: int, wish: str = "") -> str:
    """Text of a model that knows nothing, and would begin with `wish`."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(grammar=grammar, seed=seed, temperature=0.8)
    sampler = Sampler(params, tokenizer.vocab_size, (), GrammarCompiler(tokenizer).matcher(grammar))
    liked = tokenizer.encode(wish, add_bos=False, parse_special=True)
    tokens: list[int] = []
    for step in range(600):
        logits = rng.standard_normal(tokenizer.vocab_size).astype(np.float32)
        logits[list(tokenizer.eos_ids)] += 6
        logits[liked[step : step + 1]] += 50
        token = sampler.sample(logits).token
        if token in tokenizer.eos_ids:
            return tokenizer.decode(tokens, skip_special=False)
        tokens.append(token)
    raise AssertionError("the output has no end")


def read(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolParser(form.name, [tool.name for tool in TOOLS])
    content, calls = "", []
    for event in parser.push(text) + parser.finish():
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, Call):
            calls.append((event.name, ""))
        else:
            calls[event.number] = (calls[event.number][0], calls[event.number][1] + event.text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def valid(name: str, arguments: Any) -> bool:
    if name == "a.b-c":
        return arguments == {}
    return (
        name == "weather"
        and set(arguments) == {"city", "days"}
        and arguments["city"] in CITY["$defs"]["city"]["enum"]
        and arguments["days"] in range(1, 10)
    )


FORMS = [("hermes", False), ("llama3", False), ("mistral", False), ("mistral", True)]


@pytest.mark.parametrize(("name", "has_args"), FORMS)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("most_calls", [1, 3])
def test_required_calls_are_valid(tokenizers, name, has_args, marked, most_calls):
    form = ToolFormat(name, tokenizers[marked], has_args)
    grammar = form.grammar(TOOLS, most_calls=most_calls)
    numbers = set()
    for seed in range(6):
        content, calls = read(form, sampled(tokenizers[marked], grammar, seed))
        assert content == ""
        assert all(valid(*call) for call in calls)
        numbers.add(len(calls))
    assert numbers <= set(range(1, most_calls + 1))
    assert form.spells_control_tokens == marked


@pytest.mark.parametrize(("name", "has_args"), FORMS)
@pytest.mark.parametrize("marked", [False, True])
def test_calls_that_may_be_made_are_valid(tokenizers, name, has_args, marked):
    form = ToolFormat(name, tokenizers[marked], has_args)
    grammar = form.grammar(TOOLS, most_calls=2, otherwise="")
    assert sampled(tokenizers[marked], grammar, 1)[:1] != "{"
    begun = {"hermes": CALL, "llama3": "{", "mistral": TOOL_CALLS}[name]
    made, said = [], "" if name == "llama3" else "So <it> [is]. "
    for seed in range(6):
        content, calls = read(form, sampled(tokenizers[marked], grammar, seed, said + begun))
        assert content.startswith(said.strip())
        assert begun not in content or name == "llama3"
        assert all(valid(*call) for call in calls)
        made += calls
    assert made


def test_json_may_come_instead_of_calls(tokenizers):
    form = ToolFormat("hermes", tokenizers[False])
    grammar = form.grammar(TOOLS, most_calls=1, otherwise='%json {"const": 7}')
    told = {sampled(tokenizers[False], grammar, seed)[0] for seed in range(12)}
    assert told == {"7", "<"}


@pytest.mark.parametrize(
    ("source", "name", "has_args"),
    [
        ("{{ messages }}", "hermes", False),
        ("{{ tools }}<tool_call>", "hermes", False),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', "llama3", False),
        ("{{ tools }}<|python_tag|>", "llama3", False),
        ("{{ tools }}[TOOL_CALLS] [", "mistral", False),
        ("{{ tools }}[TOOL_CALLS]x[ARGS]", "mistral", True),
        ("{# [TOOL_CALLS] #}", "hermes", False),
    ],
)
def test_the_format_is_that_of_the_template(tokenizers, source, name, has_args):
    form = tool_format(ChatTemplate(source), tokenizers[False])
    assert (form.name, form.has_args) == (name, has_args)
    new = form.new_id()
    assert len(new) == 9 if name == "mistral" else new.startswith("call_")
    assert new.replace("_", "").isalnum()
