"""Every error a user can meet. The message names the file, tensor, field or flag, and says what to do.

The command line turns `InputError` into exit code 2 (misuse) and any other `ProlepsisError` into exit code 1.
"""


class ProlepsisError(Exception):
    """Something failed although the request was sound."""


class InputError(ProlepsisError):
    """What was asked for cannot be done: a bad file, flag, field or prompt."""

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        """`field`: the name of the parameter that is at fault, where it is one."""
        super().__init__(message)
        self.field = field


class ContextLengthError(InputError):
    """A prompt that the context has no room for."""


class ModelFileError(InputError):
    """A model file is missing, damaged, or of a kind this version does not read."""


class SegmentError(InputError):
    """Coded KV is truncated, damaged, foreign, of a newer version, or belongs to another model."""


class ProfileMissingError(SegmentError):
    """Coded KV is sound as far as is known, but the profile that it was coded with is not kept here."""


class CapacityError(ProlepsisError):
    """The KV pool has no free block left for what was asked."""


class TierError(ProlepsisError):
    """A tier of the store failed. What was asked of it was not done, or not for certain."""

    kind = "failed"


class TierFullError(TierError):
    """The entry does not fit: it is larger than the tier, or what is there may not be evicted."""

    kind = "full"


class TierDamagedError(TierError):
    """What is stored is not what was put. The tier has deleted it."""

    kind = "damaged"


class TierTimeoutError(TierError):
    """The tier did not answer in time."""

    kind = "timeout"


class IntegrityError(ProlepsisError):
    """An internal invariant is broken: a fault of Prolepsis itself, found before it could return a wrong result."""
