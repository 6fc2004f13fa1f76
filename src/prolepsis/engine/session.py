"""Sequences that outlive the process: saved losslessly coded, restored bit for bit or refused."""

import os
from collections.abc import Sequence as Many
from contextlib import ExitStack
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.profile import GRID, grid_spans, measure
from prolepsis.coding.side_by_side import segments_at_once
from prolepsis.engine.identity import identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.past import CachedPast
from prolepsis.engine.profile_store import profile_of_session
from prolepsis.engine.sequence import Sequence
from prolepsis.errors import InputError, SegmentError
from prolepsis.model.chat_template import Message
from prolepsis.model.conversation_limits import check_messages
from prolepsis.model.decoder import PRECISIONS, precision_of
from prolepsis.store import BusyError, append_session, open_session, replace_file

_SPARE_SEGMENTS = 8  # beyond twice what a file needs, before it is written whole again

_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """What a session holds besides coded KV: the chat, and tokens whose K and V are not computed yet."""

    messages: list[dict[str, str]]
    pending: list[_TokenId]


class SavedSession(NamedTuple):
    """A restored session. Where that was allowed, `refused` says why KV from some segment on was not restored, and
    `torn` why the file's last save was left out.
    """

    sequence: Sequence
    messages: list[dict[str, str]]
    predictor: str
    refused: str | None
    torn: str | None


class SaveReport(NamedTuple):
    """What a save left: the file's tokens, predictor and size, and how many of the tokens were added to an earlier
    state of the file; None where it was written whole.
    """

    tokens: int
    predictor: str
    file_bytes: int
    appended: int | None


def save_session(
    path: str | os.PathLike[str],
    llm: LLM,
    sequence: Sequence,
    messages: Many[Message] = (),
    *,
    profile: AnyProfile | None = None,
) -> SaveReport:
    """Save `sequence` to `path`, coded with `profile`, or with one measured on it.

    Where the file holds an earlier state of the same sequence (same model and arithmetic, tokens that this one begins
    with, same profile if one is given), only the tokens it lacks are appended; what it held before stays intact
    whatever happens. Else a new file takes its place when it is whole; so too where appending would make a bad file:
    one of more than 8 segments and twice those it needs (short segments cost size); or, where the file's profile was
    measured, one of more than twice the tokens that there were to measure.

    Of kivi4, the tokens behind the last whole block of 128 are pending in the file: they are computed again, to the
    same bits, when it is loaded.

    Raises InputError if it cannot be written, and BusyError, one of them, while another process saves to it.
    """
    _require_whole(llm)
    if sequence.num_cached == 0:
        raise InputError(f"{os.fspath(path)}: there is nothing to save, the session has no computed token")
    if os.path.isfile(path):
        appended = _append(path, llm, sequence, messages, profile)
        if appended is not None:
            return appended
    with replace_file(path) as file:
        return write_session(file, llm, sequence, messages, profile=profile)


def write_session(
    file: BinaryIO,
    llm: LLM,
    sequence: Sequence,
    messages: Many[Message] = (),
    *,
    profile: AnyProfile | None = None,
) -> SaveReport:
    """Write `sequence` whole to a binary file, which may be a pipe. See `save_session`."""
    _require_whole(llm)
    cached, whole = llm.kv_cache.readable(sequence.num_cached), None
    dtype, rope = llm.kv_cache.dtype, llm.rope
    if profile is None:
        whole = llm.kv_cache.read(sequence.table, 0, cached)
        profile = measure(whole, dtype, rope, 0)
    writer = SessionWriter(
        file,
        profile,
        dtype=dtype,
        rope=rope,
        model=identity(llm),
        numerics=llm.runner.decoder.numerics,
        block_size=llm.kv_cache.block_size,
        past=CachedPast(llm.runner, sequence),
    )
    if whole is None:
        _add_cached(writer, llm, sequence, cached)
    else:
        writer.add(whole, sequence.tokens[:cached])
    writer.finish(_pack_metadata(sequence, cached, messages))
    return SaveReport(cached, writer.header.predictor, writer.file_bytes, None)


def _require_whole(llm: LLM) -> None:
    """Raise InputError where sequences are not held whole."""
    if llm.runner.eviction is not None:
        raise InputError(
            "sessions hold K and V of every token, and kv_evict drops some: leave out kv_evict, or do without sessions"
        )


def _append(
    path: str | os.PathLike[str], llm: LLM, sequence: Sequence, messages: Many[Message], profile: AnyProfile | None
) -> SaveReport | None:
    """Add what the file at `path` lacks; None, and nothing done, where a new file is needed or better."""
    cached = llm.kv_cache.readable(sequence.num_cached)
    with ExitStack() as stack:
        try:
            past = CachedPast(llm.runner, sequence)
            old, writer = stack.enter_context(append_session(path, profile=profile, past=past))
        except BusyError:
            raise
        except InputError:
            return None
        try:
            _require_ours(old, llm)
            if not _begins_with(sequence, cached, old) or _is_better_whole(old, cached, profile):
                return None
            old.verify(values=False)
            if old.coder.sequential and not _has_the_same_bits(old, llm, sequence):
                return None
        except InputError:
            return None
        metadata, first = _pack_metadata(sequence, cached, messages), old.stop
        if first < cached:
            _add_cached(writer, llm, sequence, cached)
        if first < cached or metadata != old.metadata or old.torn is not None:
            writer.finish(metadata)
        return SaveReport(cached, writer.header.predictor, writer.file_bytes, cached - first)


def _add_cached(writer: SessionWriter, llm: LLM, sequence: Sequence, cached: int) -> None:
    """Add what the file lacks of the first `cached` tokens, some segments at a time: only their KV is copied."""
    step = GRID * segments_at_once(writer.header)
    while (first := writer.position) < cached:
        stop = min(first - first % step + step, cached)
        writer.add(llm.kv_cache.read(sequence.table, first, stop), sequence.tokens[first:stop])


def _begins_with(sequence: Sequence, cached: int, old: SessionReader) -> bool:
    return old.ids is not None and old.stop <= cached and sequence.tokens[: old.stop] == old.ids.tolist()


def _has_the_same_bits(old: SessionReader, llm: LLM, sequence: Sequence) -> bool:
    """Whether the file's KV is the cache's: what is appended is coded with the one, and decoded with the other."""
    for entry in old.segments:
        kv = llm.kv_cache.read(sequence.table, entry.start, entry.stop)
        if old.coder.checksums(kv) != entry.index["values"].tolist():
            return False
    return True


def _is_better_whole(old: SessionReader, tokens: int, profile: AnyProfile | None) -> bool:
    """The rule of `save_session`."""
    if not old.saves or (profile is not None and profile.fingerprint != old.header.profile_fingerprint):
        return True
    outgrown = old.header.profile is not None and tokens > 2 * old.saves[0]
    added = sum(1 for _ in grid_spans(old.stop, tokens - old.stop))
    return outgrown or len(old.segments) + added > 2 * -(-tokens // GRID) + _SPARE_SEGMENTS


def load_session(
    path: str | os.PathLike[str], llm: LLM, *, recompute: bool = False, profile: AnyProfile | None = None
) -> SavedSession:
    """Restore the session at `path` into the cache of `llm`.

    recompute: where a segment is damaged, restore what comes before it and leave the rest of the tokens pending, to be
    computed again; where the last save was broken off, restore the one before it, or what is whole of the first one.
    `refused` and `torn` then say what was wrong. profile: for a file that keeps its own outside; where it is not the
    one, that is looked for among the kept ones (`profile_store`).

    Raises SegmentError (damaged, foreign, another model's), InputError (not readable, too long for the context),
    CapacityError (no room in the cache); nothing is kept of the session then.
    """
    _require_whole(llm)
    with open_session(path, profile=profile, salvage=recompute) as reader:
        _require_ours(reader, llm)
        _find_profile(reader, llm, profile)
        _ = reader.coder  # a missing profile is no damage that computing again should hide
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
        return SavedSession(sequence, metadata.messages, reader.header.predictor, refused, reader.torn)


def _find_profile(reader: SessionReader, llm: LLM, given: AnyProfile | None) -> None:
    header = reader.header
    here = None if given is None else given.fingerprint
    if header.profile is None and header.profile_fingerprint != here:
        reader.use(profile_of_session(header, reader.name, llm))


def _restore(reader: SessionReader, sequence: Sequence, llm: LLM, recompute: bool) -> str | None:
    past = CachedPast(llm.runner, sequence)
    try:
        for segment, kv in reader.decoded(past=past):
            if past.known < segment.stop:
                past.append(kv)
    except SegmentError as error:
        if not recompute:
            raise
        past.discard_room()
        return str(error)
    return None


def _require_ours(reader: SessionReader, llm: LLM) -> None:
    reader.require(model=identity(llm))
    there, here = reader.header.dtype, llm.kv_cache.dtype
    if there != here:
        raise SegmentError(f"{reader.name} holds a {there} cache and this one is {here}: use --kv-dtype {there}")
    theirs, ours = reader.header.numerics, llm.runner.decoder.numerics
    if theirs != ours and theirs in PRECISIONS.values():
        precision = precision_of(theirs)
        raise SegmentError(f"{reader.name} was computed in {precision} precision: use --precision {precision}")
    config = llm.config
    reader.require(
        numerics=ours,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=llm.rope,
        start=0,
        tokens="ids",
    )


def _pack_metadata(sequence: Sequence, cached: int, messages: Many[Message]) -> bytes:
    pending = sequence.tokens[cached:]
    return msgspec.json.encode(_Metadata([dict(message) for message in messages], pending))


def _read_metadata(reader: SessionReader) -> _Metadata:
    if not reader.saves:
        return _Metadata([], [])
    try:
        metadata = msgspec.json.decode(reader.metadata, type=_Metadata)
        check_messages(metadata.messages)
    except (msgspec.MsgspecError, InputError) as error:
        raise SegmentError(f"{reader.name}: the metadata is not that of a session: {error}") from error
    return metadata


def _check_tokens(reader: SessionReader, tokens: list[int], llm: LLM) -> None:
    if not tokens and reader.torn is not None:
        raise SegmentError(reader.torn)
    if not tokens or max(tokens) >= llm.config.vocab_size:
        raise SegmentError(f"{reader.name}: its token ids are not those of a vocabulary of {llm.config.vocab_size}")
    if len(tokens) > llm.max_context:
        raise InputError(
            f"{reader.name} holds {len(tokens)} tokens, but the context holds {llm.max_context}; "
            "raise max_context or kv_memory"
        )
