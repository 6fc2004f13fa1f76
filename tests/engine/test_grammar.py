"""Output that follows a grammar: always, however it comes about; and what is refused as a grammar."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis import LLM, SamplingParams
from prolepsis.engine.grammar import MAX_DEPTH, MAX_NODES, MAX_PATTERNS, MAX_PROPERTIES, MAX_TEXT, Grammar
from prolepsis.errors import InputError

PAIR = Path(__file__).parents[1] / "data" / "pair"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 9, "minItems": 6},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(PERSON)
SAMPLED = SamplingParams(grammar=GRAMMAR, max_tokens=110, seed=5)

leaves = st.one_of(
    st.tuples(st.integers(-50, 50), st.integers(0, 50)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
)


def containers(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(st.text('abcé"', min_size=1, max_size=3), children, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(objects, children.map(lambda items: {"type": "array", "items": items, "maxItems": 2}))


schemas = st.recursive(leaves, containers, max_leaves=4)


def follows(value: object, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(follows(each, schema["properties"][name]) for name, each in value.items())
        )
    if schema["type"] == "array":
        most = schema["maxItems"]
        return isinstance(value, list) and len(value) <= most and all(follows(each, schema["items"]) for each in value)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return isinstance(value, bool) if schema["type"] == "boolean" else value is None


@settings(max_examples=25, deadline=None)
@given(schemas, st.integers(0, 99))
def test_what_is_sampled_follows_its_schema(tiny_llm, schema, seed):
    params = SamplingParams(grammar=Grammar.json_schema(schema), temperature=1.5, seed=seed, max_tokens=400)
    [done] = tiny_llm.generate([[5, 6]], params)
    assert (done.finish_reason, done.error) == ("stop", None)
    assert follows(json.loads(done.text), schema)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[0-9]{3}-(ab|cd)"), "[0-9]{3}-(ab|cd)"),
        (Grammar.choice(["yes", 'n"o', "é\n"]), 'yes|n"o|é\n'),
        (Grammar("lark", 'start: "x" %json {"type": "boolean"}'), "x(true|false)"),
        (Grammar.json_schema({"const": {"a": [1]}}), r'\{\s*"a"\s*:\s*\[\s*1\s*\]\s*\}'),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_kinds_of_grammars(llm, grammar, pattern):
    for done in llm.generate("a", SamplingParams(grammar=grammar, seed=1, n=4)):
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text)
        assert done.token_ids[-1] in llm.tokenizer.eos_ids


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "(("), ("regex", "\ud800"), ("lark", "start: ("), ("choice", '["\\ud800"]'), ("json_schema", "["),
     ("json_schema", "[" * 9_999), ("json_schema", '{"const": "\\ud800"}'), ("gbnf", ""), ("regex", None)],
)  # fmt: skip
def test_refuses_other_grammars_by_name(llm, kind, text):
    with pytest.raises(InputError, match=r"^response_format: ") as caught:
        llm.grammars.matcher(Grammar(kind, text))
    assert caught.value.field == "response_format"


def test_of_many_texts_and_long_ones_one_is_written(llm):
    texts = [f"c{number}" for number in range(20_000)]
    assert llm.generate("a", SamplingParams(grammar=Grammar.choice(texts), seed=1))[0].text in texts
    long = "zebra é " * 150
    [done] = llm.generate("a", SamplingParams(grammar=Grammar.choice([long]), max_tokens=1_500))
    assert done.text == long


def test_any_json_object_is_an_object_as_far_as_it_goes(llm):
    [done] = llm.generate("a", SamplingParams(grammar=Grammar("json_object"), seed=2, max_tokens=16))
    assert done.text.startswith("{")


def test_no_name_of_a_control_token_gets_into_a_text(llm):
    [special] = [token for name, token in llm.tokenizer.special_tokens.items() if name == "<|im_start|>"]
    matcher = llm.grammars.matcher(Grammar("regex", "(?s:.*)"))
    assert not matcher.allowed()[special]
    assert matcher.allowed()[list(llm.tokenizer.eos_ids)].all()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return outcomes(LLM(PAIR / "target-Q8_0.gguf", kv_memory=16 << 20, threads=1, block_size=16))


def outcomes(llm: LLM) -> list[Any]:
    greedy = replace(SAMPLED, temperature=0)
    params = [SAMPLED, greedy, replace(SAMPLED, n=3, top_p=0.9, repetition_penalty=1.1), replace(SAMPLED, stop='"age')]
    done = llm.generate(["A person: ", "{", "name", "x" * 40], params)
    assert all(each.error is None for each in done)
    return [(each.text, each.token_ids, each.finish_reason) for each in done]


@pytest.mark.parametrize("draft", ["ngram", "twin", f"model:{PAIR / 'draft-F16.gguf'}"])
def test_drafts_change_nothing(expected, draft):
    llm = LLM(PAIR / "target-Q8_0.gguf", kv_memory=16 << 20, threads=1, block_size=16, draft=draft, draft_tokens=3)
    assert outcomes(llm) == expected
    if draft != "ngram":
        assert llm.engine.statistics().drafts.accepted_at
    for done in llm.generate("A person: ", replace(SAMPLED, seed=None, n=8, max_tokens=600)):
        assert follows(json.loads(done.text), PERSON)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_changes_nothing(expected, preemption):
    bytes_per_token = LLM(PAIR / "target-Q8_0.gguf", threads=1).kv_cache.bytes_per_token
    llm = LLM(PAIR / "target-Q8_0.gguf", kv_memory=bytes_per_token * 160, threads=1, block_size=16,
              preemption=preemption)  # fmt: skip
    assert outcomes(llm) == expected
    assert llm.engine.statistics().preemptions > 0


def test_a_grammar_that_becomes_too_complex_fails_its_own_request_only(expected):
    llm = LLM(PAIR / "target-Q8_0.gguf", kv_memory=16 << 20, threads=1, block_size=16, draft="twin", draft_tokens=3)
    hard = replace(SAMPLED, grammar=Grammar("regex", r"((\w+\s?){1,300}[^x]?){1,300}"))
    failed, done = llm.generate(["x", "A person: "], [hard, SAMPLED])
    assert isinstance(failed.error, InputError)
    assert str(failed.error).startswith("response_format: ")
    assert (done.text, done.token_ids, done.finish_reason) == expected[0]
    assert llm._speculation is not None
    assert llm._speculation.failure is None
    assert llm.grammars.matcher(hard.grammar).allowed().any()  # made anew


def test_logprobs_are_those_of_the_model(llm):
    grammar = Grammar.choice(["zebra"])
    [forced] = llm.generate("a", SamplingParams(grammar=grammar, temperature=0, logprobs=3))
    [free] = llm.generate("a", SamplingParams(temperature=0, logprobs=3, max_tokens=1))
    assert forced.text == "zebra"
    assert forced.logprobs[0].top_logprobs == free.logprobs[0].top_logprobs
    assert forced.logprobs[0].logprob <= free.logprobs[0].logprob


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "is an object"),
        ({"type": "frob"}, "frob"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"$ref": "file:///etc/passwd"}, "etc/passwd"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "#"}, "NoExtension"),
        (False, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "frobnicate"}, "frobnicate"),
        ({"type": "string", "pattern": "(("}, "unclosed"),
        ({"type": "string", "pattern": "a" * (MAX_PATTERNS + 1)}, "characters of regular expressions"),
        ({"patternProperties": {"a" * (MAX_PATTERNS + 1): {}}}, "characters of regular expressions"),
        (nested(MAX_DEPTH), "levels"),
        ({"properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}, "entries in an object"),
        ({"enum": list(range(MAX_NODES))}, "values"),
        ({"const": "x" * MAX_TEXT}, "characters"),
        ({"allOf": [{"type": "string", "pattern": f"a.{{0,200}}b.*c{{{i}}}"} for i in range(9)]}, "regex is empty"),
        ({"$defs": {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"a{i}": {}}}]}] * 2}
                    for i in range(20)} | {"d20": {}}, "$ref": "#/$defs/d0"}, "too large"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refuses_schemas_by_name(llm, schema, message):
    with pytest.raises(InputError, match=message) as caught:
        llm.grammars.matcher(Grammar.json_schema(schema))
    assert caught.value.field == "response_format"
    assert str(caught.value).startswith("response_format: ")
    assert len(str(caught.value)) < 400


def test_a_long_chain_of_references_does_not_end_the_process(llm):
    count, size = 2_600, 390  # definitions, and those in one object
    chunks: dict[str, Any] = {f"c{i}": {"$defs": {}} for i in range(count // size + 1)}
    for i in range(count):
        following = f"#/$defs/c{(i + 1) // size}/$defs/d{i + 1}"
        chunks[f"c{i // size}"]["$defs"][f"d{i}"] = {"items": {"$ref": following}}
    chunks[f"c{count // size}"]["$defs"][f"d{count}"] = {"type": "string"}
    matcher = llm.grammars.matcher(Grammar.json_schema({"$defs": chunks, "$ref": "#/$defs/c0/$defs/d0"}))
    assert matcher.allowed().any()


def test_the_largest_object_can_be_written(llm):
    names = [f"p{i}" for i in range(MAX_PROPERTIES)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    matcher = llm.grammars.matcher(Grammar.json_schema(schema))
    for token in llm.tokenizer.encode('{"p7": true, "p399": false, "x": "y"}'):
        assert matcher.allowed()[token]
        matcher.accept(token)
    assert matcher.allowed()[min(llm.tokenizer.eos_ids)]


def test_what_is_not_strict_leaves_out_what_is_not_supported(llm):
    schema = {"oneOf": [{"type": "string", "format": "frobnicate"}, {"type": "integer"}]}
    assert llm.grammars.matcher(Grammar.json_schema(schema, strict=False)).allowed().any()


def test_a_schema_says_nothing_about_how_it_is_compiled(llm):
    schema = {"const": 1, "x-guidance": {"whitespace_pattern": "x", "lenient": True}}
    matcher = llm.grammars.matcher(Grammar.json_schema([schema][0]))
    assert matcher.allowed().any()


@pytest.mark.parametrize("fields", [{"grammar": "x"}, {"grammar": GRAMMAR, "ignore_eos": True}])
def test_params_refuse(fields):
    with pytest.raises(InputError):
        SamplingParams(**fields)


def test_a_matcher_ends_with_the_output(llm):
    matcher = llm.grammars.matcher(Grammar.choice(["a"]))
    [token] = llm.tokenizer.encode("a")
    logits = np.zeros(llm.config.vocab_size, np.float32)
    matcher.accept(token)
    assert set(np.flatnonzero(np.isfinite(matcher.mask(logits)))) == llm.tokenizer.eos_ids
    other = matcher.copy()
    other.accept(min(llm.tokenizer.eos_ids))
    assert np.isfinite(other.mask(logits)).all()
    assert not np.isfinite(matcher.mask(logits)).all()
