"""Keys of a GGUF file for a model that comes from a Hugging Face checkpoint.

llama.cpp knows a pre-tokeniser by name only, so the checkpoint's must be one of `PRE_TOKENIZERS`.
"""

from typing import Any

from prolepsis.errors import ModelFileError
from prolepsis.model.byte_bpe import PRE_TOKENIZERS
from prolepsis.model.config import ModelConfig
from prolepsis.model.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

_GPT2 = PRE_TOKENIZERS["gpt-2"].expressions[0]
_DIGIT = r"\p{N}"
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """Shapes and constants: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.rope.dim,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    if config.rope.scaling_factor != 1:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.scaling_factor}
    named = {f"{config.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": config.architecture, "general.name": config.name, **named}


def tokenizer_keys(values: dict[str, Any], tokenizer: Tokenizer, declared_eos: Any) -> dict[str, Any]:
    """The tokenizer. values: the content of tokenizer.json; declared_eos: an id, or several, of config.json.

    Raises ModelFileError for one that llama.cpp has no name for.
    """
    model = values["model"]
    tokens, types = _vocabulary(values, tokenizer.vocab_size)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [tuple(each.split(" ") if isinstance(each, str) else each) for each in model["merges"]]
    if _is_byte_level(values):
        keys |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_name(values.get("pre_tokenizer"), bool(model.get("ignore_merges"))),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
    else:
        scores = dict.fromkeys(tokens, 0.0)
        for rank, pair in reversed(list(enumerate(merges))):
            scores["".join(pair)] = -float(rank + 1)
        kinds = [BYTE if token in _BYTES else kind for token, kind in zip(tokens, types, strict=True)]
        if model.get("unk_token") in tokens:
            unknown = tokens.index(model["unk_token"])
            kinds[unknown] = UNKNOWN
            keys["tokenizer.ggml.unknown_token_id"] = unknown
        keys |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": [scores[token] for token in tokens],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": tokenizer.add_space_prefix,
        }
    if tokenizer.bos_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    declared = declared_eos if isinstance(declared_eos, list) else [declared_eos]
    eos = next((index for index in declared if index in tokenizer.eos_ids), min(tokenizer.eos_ids, default=None))
    if eos is not None:
        keys["tokenizer.ggml.eos_token_id"] = eos
    return {**keys, "tokenizer.ggml.add_bos_token": tokenizer.add_bos}


def _vocabulary(values: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids without a token get a name that no text spells."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [CONTROL] * size
    for token, index in values["model"]["vocab"].items():
        if index < size:
            tokens[index], types[index] = token, NORMAL
    for added in values.get("added_tokens") or []:
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    return tokens, types


def _is_byte_level(values: dict[str, Any]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(values.get("decoder"), "decoders"))


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    return list(part.get(inner, [])) if part.get("type") == "Sequence" else [part]


def _pre_name(part: Any, ignore_merges: bool) -> str:
    """The name of the pre-tokeniser in llama.cpp."""
    expressions: list[str] = []
    for step in _steps(part, "pretokenizers"):
        kind = step.get("type")
        if kind == "Split" and "Regex" in step.get("pattern", {}):
            expressions.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step.get("individual_digits"):
            expressions.append(_DIGIT)
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            expressions += [_GPT2] if step.get("use_regex", True) else []
        else:
            expressions.append(f"{kind}")
    for name, pre in PRE_TOKENIZERS.items():
        if pre.expressions == tuple(expressions) and pre.ignore_merges == ignore_merges:
            return name
    raise ModelFileError(
        f"the tokenizer cuts text into words by {' then '.join(expressions) or 'nothing'}, for which GGUF has no name "
        "known here; write a Hugging Face directory (--format safetensors)"
    )
