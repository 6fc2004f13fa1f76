"""What calibration needs to know of the activations that a matrix is multiplied with."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class InputStatistics:
    """Sums over tokens. products: float64 [columns, columns], of X^T X; magnitudes: float64 [columns], of |X|."""

    columns: int
    tokens: int = 0
    products: NDArray[np.float64] = field(init=False)
    magnitudes: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.products = np.zeros((self.columns, self.columns))
        self.magnitudes = np.zeros(self.columns)

    def add(self, inputs: NDArray[np.float32]) -> None:
        """Count `inputs` in, float32 [tokens, columns]."""
        self.tokens += len(inputs)
        self.products += inputs.T @ inputs
        self.magnitudes += np.abs(inputs).sum(axis=0, dtype=np.float64)

    @property
    def hessian(self) -> NDArray[np.float64]:
        """2 X^T X a token: of the squared error of a row's product, as a function of that row."""
        return self.products * (2 / max(1, self.tokens))

    @property
    def mean_magnitude(self) -> NDArray[np.float32]:
        """Mean |x| of each column, float32 [columns]."""
        return (self.magnitudes / max(1, self.tokens)).astype(np.float32)

    @property
    def mean_square(self) -> NDArray[np.float32]:
        """Mean x^2 of each column, float32 [columns]: what llama.cpp calls an importance matrix."""
        return (np.diagonal(self.products) / max(1, self.tokens)).astype(np.float32)


def output_error(weight: NDArray[np.float32], rounded: NDArray[np.float32], hessian: NDArray[np.floating]) -> float:
    """Mean over tokens of the squared error of a product, from its Hessian: tr((W - Q) H (W - Q)^T) / 2."""
    missed = weight - rounded
    return float(np.einsum("rc,rc->", missed @ hessian.astype(np.float32), missed, dtype=np.float64) / 2)
