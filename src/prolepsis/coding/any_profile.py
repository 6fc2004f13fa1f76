"""Profiles of every kind, and what all of them can be asked."""

from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.profile import Profile
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.errors import InputError

AnyProfile = Profile | LinearProfile | TwinProfile


def geometry_of(profile: AnyProfile, dtype: DType) -> Geometry:
    """What a cache of this dtype looks like under the profile.

    Raises:
        InputError: the profile was calibrated for another dtype.
    """
    if isinstance(profile, Profile):
        layers, _, kv_heads, head_dim = profile.scales.shape
        return Geometry(dtype, layers, kv_heads, head_dim)
    if dtype != profile.geometry.dtype:
        raise InputError(f"the profile was calibrated for a cache of {profile.geometry.dtype}, not {dtype}")
    return profile.geometry
