"""How matrices lie in a Hugging Face checkpoint: as GPTQ, AWQ or EXL2 has them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.awq_layout import pack_awq
from prolepsis.quant.exl2_grid import scale_factors
from prolepsis.quant.exl2_layout import pack_exl2
from prolepsis.quant.gptq_layout import pack_gptq
from prolepsis.quant.matrix import Codes, HeldMatrix

Tensors = dict[str, NDArray[Any]]


class Packing(Protocol):
    """One of these formats."""

    @property
    def rows(self) -> int:
        """Of what number rows must be a multiple."""
        ...

    def tensors(self, matrix: HeldMatrix) -> Tensors:
        """The tensors of a matrix, by the last part of their names."""
        ...

    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json: what `transformers`, vLLM and the tools of the format want to know."""
        ...


@dataclass(frozen=True)
class GptqPacking:
    """bits, group (0: whole rows), symmetric, act_order: of the codes.

    Zero points that vary are written in version 2 of the layout, as version 1 cannot say 0.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool

    @property
    def rows(self) -> int:
        """See `Packing`: zero points fill words."""
        return {2: 16, 3: 32, 4: 8, 8: 4}[self.bits]

    def tensors(self, matrix: HeldMatrix) -> Tensors:
        """See `Packing`."""
        part = _only(matrix)
        assert part.zeros is not None
        group_of = np.arange(matrix.shape[1], dtype=np.int32) // matrix.forms[0].group
        codes = part.codes
        if matrix.order is not None:
            codes = np.empty_like(codes)
            codes[:, matrix.order] = part.codes
            sorted_groups, group_of = group_of, np.empty_like(group_of)
            group_of[matrix.order] = sorted_groups
        words, zeros = pack_gptq(codes, part.zeros, self.bits, 1 if self.symmetric else 2)
        return {"qweight": words, "qzeros": zeros, "g_idx": group_of, "scales": part.scales.T}

    def config(self) -> dict[str, Any]:
        """See `Packing`."""
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group or -1,
            "desc_act": self.act_order,
            "sym": self.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if self.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "true_sequential": True,
        }


@dataclass(frozen=True)
class AwqPacking:
    """AWQ's own layout, of 4 bits. group: 0 for whole rows."""

    group: int

    rows = 8

    def tensors(self, matrix: HeldMatrix) -> Tensors:
        """See `Packing`."""
        part = _only(matrix)
        assert part.zeros is not None
        return {"qweight": pack_awq(part.codes), "qzeros": pack_awq(part.zeros), "scales": part.scales.T}

    def config(self) -> dict[str, Any]:
        """See `Packing`."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }


@dataclass(frozen=True)
class Exl2Packing:
    """EXL2: columns of different bits side by side. bits: of a weight on average."""

    bits: float

    rows = 8

    def tensors(self, matrix: HeldMatrix) -> Tensors:
        """See `Packing`."""
        groups: list[tuple[int, int]] = []
        shares, most, codes = [], [], []
        for form, part in zip(matrix.forms, matrix.parts, strict=True):
            assert isinstance(part, Codes)
            bits = KINDS[form.kind].bits
            groups += [(bits, min(form.group, form.columns - i)) for i in range(0, form.columns, form.group)]
            share, largest = scale_factors(part.scales)
            shares.append(share)
            most.append(largest)
            codes.append(part.codes)
        order = np.arange(matrix.shape[1], dtype=np.int32) if matrix.order is None else matrix.order
        packed = pack_exl2(
            np.concatenate(codes, axis=1), groups, np.concatenate(shares, axis=1), np.concatenate(most), order
        )
        return packed._asdict()

    def config(self) -> dict[str, Any]:
        """See `Packing`."""
        return {"quant_method": "exl2", "version": "0.2.0", "bits": self.bits, "head_bits": 16}


def _only(matrix: HeldMatrix) -> Codes:
    (part,) = matrix.parts
    assert isinstance(part, Codes)
    return part
