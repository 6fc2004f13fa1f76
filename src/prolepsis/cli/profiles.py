"""Which profile a command codes with: the named file, a kept profile, or none."""

import shlex
from pathlib import Path
from typing import Annotated, get_args

import typer

from prolepsis.cli.console import choice, note
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import DType
from prolepsis.engine.llm import LLM
from prolepsis.engine.profile_store import BY_WORTH, best_kept
from prolepsis.engine.profiles import PredictorKind, kind_of, load_profile
from prolepsis.errors import InputError

ProfileOption = Annotated[
    Path | None,
    typer.Option(
        help="A profile file of this model and cache dtype. Default: one that `prolepsis calibrate` kept; of a session "
        "that is read, the one it names."
    ),
]
PredictorOption = Annotated[
    str | None,
    typer.Option(
        help=f"What to code with: {', '.join(get_args(PredictorKind))}. Default: that of --profile; else the first "
        f"of {', '.join(BY_WORTH)} that a profile is kept for, or static, measured on the session."
    ),
]


def predictor_kind(predictor: str | None) -> PredictorKind | None:
    """The value of --predictor. Raises InputError for one that is not known."""
    return None if predictor is None else choice(predictor, "--predictor", get_args(PredictorKind))


def profile_to_save_with(llm: LLM, kind: PredictorKind | None, path: Path | None) -> AnyProfile | None:
    """The profile for what the cache of `llm` holds; None for `static`, measured on it.

    Raises:
        InputError: the file at `path` is for another model, dtype or predictor; or nothing is kept for `kind`.
    """
    dtype = llm.kv_cache.dtype
    if path is not None:
        profile = load_profile(path, llm, dtype)
        if kind not in (None, kind_of(profile)):
            raise InputError(f"--profile: {path} is for {profile.predictor_name}, and --predictor asks for {kind}")
        return profile
    if dtype == "kivi4" and kind not in (None, "static"):
        raise InputError(f"--predictor {kind}: a kivi4 cache is coded with static only")
    kept = best_kept(llm, dtype, lambda why: note(why, "yellow"), BY_WORTH if kind is None else [kind])
    if kept is None and kind not in (None, "static"):
        raise InputError(
            f"--predictor {kind}: there is no profile of it for this model and a {dtype} cache; make one with "
            f"`{_calibrating(llm, kind, dtype)}`, or name a file with --profile"
        )
    return None if kept is None else kept.profile


def _calibrating(llm: LLM, kind: PredictorKind | None, dtype: DType) -> str:
    of_dtype = "" if dtype == "bf16" else f" --kv-dtype {dtype}"
    return f"prolepsis calibrate {shlex.quote(llm.name)} --predictor {kind}{of_dtype} --text FILE"
