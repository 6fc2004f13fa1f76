"""Profiles as files: safetensors, with what they belong to as JSON in the metadata. docs/format.md, "Profile file"."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.coding.header import MAX_CHANNELS
from prolepsis.coding.linear_matrices import from_tensors, to_tensors
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.profile import PREDICTORS, Profile
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.twin_profile import PREDICTOR_NAMES, TwinProfile, from_arrays, to_arrays
from prolepsis.errors import InputError

_KEY = "prolepsis"
_STATIC = "static"  # name of the tensor that holds the bytes of a static profile
_MAX_HEADER = 1 << 20

_Size = Annotated[int, Meta(ge=1, le=4096)]
_Text = Annotated[str, Meta(max_length=1024)]


class ProfileHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile file is about. tokens: how many it was calibrated on. vocabulary, hidden: of the token embedding,
    0 where the predictor does not look at tokens; embedding: `linear_profile.embedding_check` of it. network:
    `twin_network.TwinNetwork.fingerprint`, of a twin, whose hidden state has `hidden` numbers."""

    version: Literal[1]
    predictor: _Text
    fingerprint: _Text
    model: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    dtype: DType
    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    rope: RopeSpec | None
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    vocabulary: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    hidden: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    embedding: _Text = ""
    network: _Text = ""

    @property
    def geometry(self) -> Geometry:
        """Shape and dtype of one token's KV."""
        return Geometry(self.dtype, self.layers, self.kv_heads, self.head_dim)


class _Safetensors(msgspec.Struct):
    """Of a safetensors header, the free part."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


@dataclass(frozen=True)
class CalibratedProfile:
    """A profile and what it belongs to: model (part by part, as in a session file), geometry, RoPE."""

    profile: AnyProfile
    geometry: Geometry
    rope: RopeSpec | None
    model: dict[str, str]
    tokens: int

    def require(self, name: str, model: dict[str, str], geometry: Geometry, rope: RopeSpec | None) -> None:
        """Raises InputError, naming the profile `name`, if it was made for another model or cache."""
        for what, there, here in (
            ("model", self.model, model),
            ("KV cache", self.geometry._asdict(), geometry._asdict()),
            ("RoPE", {"": self.rope}, {"": rope}),
        ):
            keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
            if keys:
                differing = "; ".join(f"{key} {there.get(key)!r} there, {here.get(key)!r} here".strip() for key in keys)
                raise InputError(f"{name} was calibrated for another {what}: {differing}; run `prolepsis calibrate`")


def to_bytes(calibrated: CalibratedProfile) -> bytes:
    """A profile file."""
    profile, geometry = calibrated.profile, calibrated.geometry
    tensors: dict[str, NDArray[Any]] = {}
    token: dict[str, Any] = {}
    static = profile if isinstance(profile, Profile) else profile.static
    if static is not None:
        tensors[_STATIC] = np.frombuffer(static.to_bytes(), np.uint8)
    if isinstance(profile, LinearProfile):
        tensors |= {name: np.ascontiguousarray(array) for name, array in to_tensors(profile.matrices).items()}
        if profile.matrices.token is not None:
            hidden = len(profile.matrices.token.means)
            token = {"vocabulary": profile.vocabulary, "hidden": hidden, "embedding": profile.embedding_is}
    if isinstance(profile, TwinProfile):
        tensors |= to_arrays(profile)
        token = {"hidden": profile.hidden, "network": profile.network_is}
    header = ProfileHeader(
        version=1,
        predictor=profile.predictor_name,
        fingerprint=profile.fingerprint,
        model=calibrated.model,
        **geometry._asdict(),
        rope=calibrated.rope,
        tokens=calibrated.tokens,
        **token,
    )
    return bytes(save(tensors, {_KEY: msgspec.json.encode(header).decode()}))


def from_bytes(data: bytes, name: str) -> CalibratedProfile:
    """The inverse of `to_bytes`; `name` is how errors call the file.

    Raises:
        InputError: foreign, truncated, damaged, of a newer version, or holding numbers that no profile has.
    """
    try:
        header = _read_header(data)
        tensors = load(data)
        static = tensors.pop(_STATIC, None)
        profile = _profile(header, tensors, None if static is None else static.tobytes())
    except (ValueError, KeyError, OverflowError, RecursionError, SafetensorError) as error:
        raise InputError(f"{name} is not a sound profile file: {error}") from error
    if profile.fingerprint != header.fingerprint:
        raise InputError(f"{name} is damaged: its fingerprint is not that of its content")
    return CalibratedProfile(profile, header.geometry, header.rope, header.model, header.tokens)


def _read_header(data: bytes) -> ProfileHeader:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
        raise ValueError("it is no safetensors file, or is truncated")
    metadata = msgspec.json.decode(data[8 : 8 + length], type=_Safetensors).metadata
    if _KEY not in metadata:
        raise ValueError("its metadata do not speak of a profile")
    return msgspec.json.decode(metadata[_KEY], type=ProfileHeader)


def _profile(header: ProfileHeader, tensors: dict[str, NDArray[Any]], static: bytes | None) -> AnyProfile:
    geometry = header.geometry
    if geometry.layers * 2 * geometry.kv_heads * geometry.head_dim > MAX_CHANNELS:
        raise ValueError(f"more than the {MAX_CHANNELS} channels a token that this version takes")
    if header.rope is not None and header.rope.dim > geometry.head_dim:
        raise ValueError(f"RoPE of {header.rope.dim} channels does not fit heads of {geometry.head_dim}")
    if header.predictor in PREDICTOR_NAMES:
        steps = None if static is None else Profile.from_bytes(static, geometry)
        variant = PREDICTOR_NAMES[header.predictor]
        return from_arrays(tensors, variant, geometry, header.rope, header.hidden, header.network, steps)
    if header.predictor != LinearProfile.predictor_name:
        if header.predictor not in PREDICTORS or static is None or tensors:
            raise ValueError(f"it does not hold what the predictor {header.predictor!r} needs")
        return Profile.from_bytes(static, geometry, header.predictor)
    return LinearProfile(
        geometry,
        header.rope,
        from_tensors(tensors, geometry, header.hidden),
        None if static is None else Profile.from_bytes(static, geometry),
        header.vocabulary,
        header.embedding,
    )
