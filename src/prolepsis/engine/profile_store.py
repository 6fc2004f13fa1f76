"""Profiles kept in the user's data directory, so that sessions find theirs without being told.

    profiles/<hash of the model's identity>/<predictor>-<dtype>-<fingerprint>.safetensors

A profile never takes the place of another one: the sessions coded with the older one need it for as long as they exist.
Saves use the newest, by the time of its file.
"""

import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from platformdirs import user_data_dir

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import DType
from prolepsis.coding.header import Header
from prolepsis.coding.profile_file import CalibratedProfile, to_bytes
from prolepsis.engine.identity import geometry, identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.profiles import PredictorKind, bind, needs_model, read_profile
from prolepsis.errors import InputError, ProfileMissingError
from prolepsis.store import replace_file

# What a save takes where it is not told. Whoever calibrated a predictor wants it used; of several, the one that makes
# the smallest files among those that restore about as fast as the KV could be computed. twin-int8a16 makes smaller ones
# for twice the arithmetic: that is for who asks.
BY_WORTH: tuple[PredictorKind, ...] = ("twin-int8", "twin-mixed", "twin-int4", "linear", "static")

_NAME = re.compile(r"[a-z0-9-]+-[a-z0-9_]+-[0-9a-f]{32}\.safetensors")  # no part of it can lead elsewhere


class KeptProfile(NamedTuple):
    """A profile, ready for its model's KV, and its file."""

    path: Path
    profile: AnyProfile


def profiles_directory() -> Path:
    """`profiles` in $PROLEPSIS_CACHE, if that is set, or in the user's data directory.

    It is no cache: sessions cannot be read without their profiles.
    """
    chosen = os.environ.get("PROLEPSIS_CACHE")
    return Path(chosen or user_data_dir("prolepsis")).expanduser() / "profiles"


def require_store() -> None:
    """Ask before long work whether a profile can be kept. Raises InputError where it is clear that not."""
    _make(profiles_directory())


def keep(calibrated: CalibratedProfile) -> Path:
    """Keep a profile; saves of its model, predictor and cache dtype use it from now on. Returns its file.

    Raises:
        InputError: it cannot be written.
    """
    directory = _directory_of(calibrated.model)
    _make(directory)
    path = directory / _name_of(calibrated)
    with replace_file(path) as file:
        file.write(to_bytes(calibrated))
    return path


def best_kept(
    llm: LLM, dtype: DType, on_skip: Callable[[str], None], kinds: Many[PredictorKind] = BY_WORTH
) -> KeptProfile | None:
    """The newest kept profile of the first of `kinds` that has one, for this model's KV in `dtype`.

    A file that is damaged, or not what its name says, is left out; on_skip(why).
    """
    model = identity(llm)
    files = _newest_first(_directory_of(model), on_skip)
    for kind in kinds:
        for path in (file for file in files if file.name.startswith(f"{kind}-{dtype}-")):
            try:
                calibrated = _read(path)
                calibrated.require(str(path), model, geometry(llm, dtype), llm.rope)
                return KeptProfile(path, bind(calibrated.profile, llm))
            except InputError as error:
                on_skip(f"a kept profile is left out: {error}")
    return None


def profile_of_session(header: Header, name: str, llm: LLM | None = None) -> AnyProfile:
    """The kept profile that a session file, which errors call `name`, names in its header.

    llm: the model that the file belongs to.

    Raises:
        ProfileMissingError: the profile is not kept, or its file is damaged.
        InputError: it needs the model, and there is none.
    """
    directory, wanted = _directory_of(header.model), _name(header.predictor, header.dtype, header.profile_fingerprint)
    path, fault = directory / wanted, ""
    if _NAME.fullmatch(wanted) and os.path.exists(path):
        try:
            calibrated = _read(path)
            calibrated.require(str(path), header.model, header.geometry, header.rope)
        except InputError as error:
            fault = f" ({error})"
        else:
            return _bound(calibrated.profile, name, llm)
    raise ProfileMissingError(
        f"{name} needs the profile {header.profile_fingerprint} of the predictor {header.predictor!r}, which is not in "
        f"the file nor kept in {directory}{fault}: pass its file with --profile, or put it there as {wanted}; no other "
        "profile will do, and without it the KV has to be computed again"
    )


def _bound(profile: AnyProfile, name: str, llm: LLM | None) -> AnyProfile:
    if llm is not None:
        return bind(profile, llm)
    if needs_model(profile):
        raise InputError(f"{name} can be decoded only with the model that it belongs to: pass it with --model")
    return profile


def _directory_of(model: Mapping[str, str]) -> Path:
    identified = msgspec.json.encode(sorted(model.items()))
    return profiles_directory() / xxhash.xxh3_128_hexdigest(identified)


def _name_of(calibrated: CalibratedProfile) -> str:
    profile = calibrated.profile
    return _name(profile.predictor_name, calibrated.geometry.dtype, profile.fingerprint)


def _name(predictor: str, dtype: DType, fingerprint: str) -> str:
    return f"{predictor.partition('/')[0]}-{dtype}-{fingerprint}.safetensors"


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        if os.access(directory, os.W_OK):
            return
        reason = "it is write-protected"
    raise InputError(
        f"a profile cannot be kept in {directory}: {reason}; set PROLEPSIS_CACHE to use another directory, or name a "
        "file with -o"
    )


def _newest_first(directory: Path, on_skip: Callable[[str], None]) -> list[Path]:
    """Files with the name of a profile. Other processes may add and remove some meanwhile."""
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        on_skip(f"kept profiles in {directory} cannot be read: {error.strerror}")
        return []
    return sorted((directory / name for name in names), key=_written, reverse=True)


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> CalibratedProfile:
    calibrated = read_profile(path)
    if path.name != _name_of(calibrated):
        raise InputError(f"{path} does not hold the profile that its name says")
    return calibrated
