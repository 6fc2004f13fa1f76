"""The drafters that can be asked for by name."""

from prolepsis.engine.sampling_params import is_int
from prolepsis.errors import InputError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.model.decoder import Decoder
from prolepsis.model.model_file import ModelFile
from prolepsis.model.pull import resolve
from prolepsis.speculate.draft_model import ModelDrafter
from prolepsis.speculate.drafter import Drafter
from prolepsis.speculate.ngram import NgramDrafter
from prolepsis.speculate.twin import TwinDrafter

MOST_DRAFTS = 32
"""Tokens that can be drafted at a time."""

_MODEL = "model:"
_LEAST_MEMORY = 16 << 20


def check_drafting(draft: str | None, draft_tokens: int | None) -> None:
    """Raise InputError, which names the field, for what no drafter can be made of."""
    known = draft in (None, "none", "ngram", "twin")
    if not known and not (isinstance(draft, str) and draft.startswith(_MODEL) and draft != _MODEL):
        raise InputError(f"draft must be none, ngram, twin or model:PATH, not {draft!r}")
    if draft_tokens is not None and not (is_int(draft_tokens) and 1 <= draft_tokens <= MOST_DRAFTS):
        raise InputError(f"draft_tokens must be in 1 .. {MOST_DRAFTS}, or left to be found out, not {draft_tokens!r}")
    if draft_tokens is not None and draft in (None, "none"):
        raise InputError("draft_tokens needs a drafter: say which with draft")


def new_drafter(draft: str | None, file: ModelFile, decoder: Decoder, cache: PagedKVCache) -> Drafter | None:
    """The drafter of a name that `check_drafting` let pass; None for none.

    file, decoder, cache: the target's. A draft model gets half as many bytes for its K and V as the target has, and
    at least 16 MiB. Raises InputError for a draft model that cannot be used.
    """
    if draft is None or draft == "none":
        return None
    if draft == "ngram":
        return NgramDrafter()
    if draft == "twin":
        return TwinDrafter(decoder, cache)
    held = cache.pool.num_blocks * cache.block_size * cache.bytes_per_token
    return ModelDrafter(
        resolve(draft.removeprefix(_MODEL)),
        file,
        memory=max(held // 2, _LEAST_MEMORY),
        max_context=decoder.max_positions,
        threads=decoder.threads,
    )
