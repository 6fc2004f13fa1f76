"""The profile of the `linear` predictor: its matrices, and what they belong to."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, Geometry
from prolepsis.coding.linear_matrices import LinearMatrices, to_tensors
from prolepsis.coding.predictors import Predictor
from prolepsis.coding.predictors.linear import EmbeddingRows, LinearPredictor
from prolepsis.coding.profile import KeptOutside, Profile
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables, universal_tables
from prolepsis.errors import InputError

_CHECKED_ROWS = 64


def embedding_check(rows: EmbeddingRows, vocabulary: int) -> str:
    """xxh3-128 in hex of 64 rows, spread over the vocabulary: tells whether two embeddings are the same."""
    ids = np.linspace(0, vocabulary - 1, _CHECKED_ROWS).astype(np.uint32)
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows(ids), np.float32).data)


@dataclass(frozen=True)
class LinearProfile(KeptOutside):
    """Matrices fitted to one model's KV of one cache dtype.

    static: the static profile of an integer cache, whose steps are coded with it. vocabulary: rows of the model's
    embedding, 0 where tokens are not looked at; embedding_is: `embedding_check` of it. embedding: given by `bound_to`.
    """

    geometry: Geometry
    rope: RopeSpec | None
    matrices: LinearMatrices
    static: Profile | None = None
    vocabulary: int = 0
    embedding_is: str = ""
    embedding: EmbeddingRows | None = None

    predictor_name = LinearPredictor.name

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, in hex, of everything that a prediction depends on."""
        digest = xxhash.xxh3_128(f"{self.vocabulary} {self.embedding_is}".encode())
        for _, array in sorted(to_tensors(self.matrices).items()):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(b"" if self.static is None else self.static.to_bytes())
        return digest.hexdigest()

    def bound_to(self, embedding: EmbeddingRows, vocabulary: int) -> "LinearProfile":
        """This profile, able to look at tokens.

        Raises:
            InputError: it is not the embedding the profile was calibrated with, or the matrices are not made for it.
        """
        if vocabulary != self.vocabulary or embedding_check(embedding, vocabulary) != self.embedding_is:
            raise InputError("the profile was calibrated with the token embedding of another model")
        token, width = self.matrices.token, embedding(np.zeros(1, np.uint32)).shape[1]
        if token is not None and width != len(token.means):
            raise InputError(
                f"the profile looks at embeddings of {len(token.means)} numbers, and the model's have {width}"
            )
        return replace(self, embedding=embedding)

    def predictor(self, rope: RopeSpec | None) -> Predictor:
        """The predictor with these matrices.

        Raises:
            InputError: another RoPE; or tokens are looked at, and `bound_to` was not called.
        """
        if rope != self.rope:
            raise InputError(f"the profile was calibrated for {self.rope}, but the KV has {rope}")
        if self.matrices.token is not None and self.embedding is None:
            raise InputError("the profile looks at tokens and needs the model's embedding (LinearProfile.bound_to)")
        return self._predictor

    @cached_property
    def _predictor(self) -> LinearPredictor:
        """Made once: packing the matrices takes longer than coding a short segment."""
        return LinearPredictor(self.geometry, self.rope, self.matrices, self._rows)

    def _rows(self, ids: NDArray[np.uint32]) -> NDArray[np.float32]:
        assert self.embedding is not None
        if ids.max(initial=0) >= self.vocabulary:
            raise InputError(f"token id {ids.max()} is beyond the {self.vocabulary} tokens of the profile's vocabulary")
        return np.ascontiguousarray(self.embedding(ids), np.float32)

    def tables(self, dtype: DType) -> TokenTables:
        """The universal tables: in units of what is expected, errors look alike everywhere."""
        return universal_tables(dtype)
