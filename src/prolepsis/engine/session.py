"""Sequences that outlive the process: saved losslessly coded, restored bit for bit or refused."""

import os
from collections.abc import Sequence as Many
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from prolepsis.coding import RopeSpec, SessionReader, SessionWriter
from prolepsis.coding.floats import DType
from prolepsis.coding.profile import measure
from prolepsis.engine.llm import LLM
from prolepsis.engine.sequence import Sequence
from prolepsis.errors import InputError, SegmentError
from prolepsis.model.chat_template import Message, check_messages
from prolepsis.model.decoder import NUMERICS
from prolepsis.store import open_session, replace_file

_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """What a session holds besides coded KV: the chat, and tokens whose K and V are not computed yet."""

    messages: list[dict[str, str]]
    pending: list[_TokenId]


class SavedSession(NamedTuple):
    """A restored session. `refused` says why KV from some segment on was not restored, where that was allowed."""

    sequence: Sequence
    messages: list[dict[str, str]]
    predictor: str
    refused: str | None


def save_session(
    path: str | os.PathLike[str], llm: LLM, sequence: Sequence, messages: Many[Message] = ()
) -> SessionWriter:
    """Write `sequence` to `path`; the file there before is replaced only by a whole one. Returns the finished writer.

    Raises InputError if it cannot be written.
    """
    cached = sequence.num_cached
    if cached == 0:
        raise InputError(f"{os.fspath(path)}: there is nothing to save, the session has no computed token")
    kv = llm.kv_cache.read(sequence.table, 0, cached)
    dtype, rope = _dtype(llm), _rope(llm)
    metadata = _Metadata([dict(message) for message in messages], sequence.tokens[cached:])
    with replace_file(path) as file:
        writer = SessionWriter(
            file,
            measure(kv, dtype, rope, 0),
            dtype=dtype,
            rope=rope,
            model=_identity(llm),
            numerics=NUMERICS,
            block_size=llm.kv_cache.block_size,
        )
        writer.add(kv, sequence.tokens[:cached])
        writer.finish(msgspec.json.encode(metadata))
    return writer


def load_session(path: str | os.PathLike[str], llm: LLM, *, recompute: bool = False) -> SavedSession:
    """Restore the session at `path` into the cache of `llm`.

    recompute: where a segment is damaged, restore what comes before it and leave the rest of the tokens pending, to be
    computed again; `refused` then says what was wrong.

    Raises SegmentError (damaged, foreign, another model's), InputError (not readable, too long for the context),
    CapacityError (no room in the cache); nothing is kept of the session then.
    """
    with open_session(path) as reader:
        _require_ours(reader, llm)
        metadata = _read_metadata(reader)
        ids = reader.ids
        assert ids is not None
        tokens = [*ids.tolist(), *metadata.pending]
        _check_tokens(reader, tokens, llm)
        sequence = llm.runner.new_sequence(tokens)
        try:
            refused = _restore(reader, sequence, llm, recompute)
        except BaseException:
            sequence.release()
            raise
        return SavedSession(sequence, metadata.messages, reader.header.predictor, refused)


def _restore(reader: SessionReader, sequence: Sequence, llm: LLM, recompute: bool) -> str | None:
    for index, segment in enumerate(reader.segments):
        try:
            values = reader.read(index)
        except SegmentError as error:
            if not recompute:
                raise
            return str(error)
        sequence.table.prepare_write(segment.count)
        sequence.table.append(segment.count)
        llm.kv_cache.write(sequence.table, segment.start, values)
    return None


def _require_ours(reader: SessionReader, llm: LLM) -> None:
    config = llm.config
    reader.require(
        model=_identity(llm),
        numerics=NUMERICS,
        dtype=llm.kv_cache.dtype,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=_rope(llm),
        start=0,
        tokens="ids",
    )


def _read_metadata(reader: SessionReader) -> _Metadata:
    try:
        metadata = msgspec.json.decode(reader.metadata, type=_Metadata)
        check_messages(metadata.messages)
    except (msgspec.MsgspecError, InputError) as error:
        raise SegmentError(f"{reader.name}: the metadata is not that of a session: {error}") from error
    return metadata


def _check_tokens(reader: SessionReader, tokens: list[int], llm: LLM) -> None:
    if not tokens or max(tokens) >= llm.config.vocab_size:
        raise SegmentError(f"{reader.name}: its token ids are not those of a vocabulary of {llm.config.vocab_size}")
    if len(tokens) > llm.max_context:
        raise InputError(
            f"{reader.name} holds {len(tokens)} tokens, but the context holds {llm.max_context}; "
            "raise max_context or kv_memory"
        )


def _identity(llm: LLM) -> dict[str, str]:
    return {"architecture": llm.config.architecture, "file": llm.fingerprint, "name": llm.config.name}


def _dtype(llm: LLM) -> DType:
    return "bf16" if llm.kv_cache.dtype == "bf16" else "fp16"


def _rope(llm: LLM) -> RopeSpec:
    """RoPE as the cache holds it: the engine always turns pairs of halves (`model.weights`)."""
    rope = llm.config.rope
    return RopeSpec(rope.theta, rope.dim, "half", rope.scaling_factor, rope.frequency_factors)
