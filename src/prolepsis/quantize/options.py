"""What a user may choose of a quantisation, checked, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prolepsis.errors import InputError
from prolepsis.kernels.cells import CELL
from prolepsis.model.config import ModelConfig
from prolepsis.quant.grid import BlockGrid, Grid, IntegerGrid
from prolepsis.quantize.gguf_rounding import Floats, Rounding
from prolepsis.quantize.layer import shapes
from prolepsis.quantize.methods import Awq, Gptq, Rtn
from prolepsis.quantize.mixed import Mixed, Recipe, require_bits
from prolepsis.quantize.walk import Method

METHODS = ("rtn", "gptq", "awq", "mixed")
FORMATS = ("safetensors", "gguf")
BITS = (2, 3, 4, 8)
GROUPS = (128, 64, 32)
"""Sizes of groups that are tried where none is given, the first that divides all rows."""

_SEARCHED_BITS = 3
"""Up to so many bits GPTQ searches for the range of a group; with more it gains nothing by that."""

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""GGUF types with scales of their own for each 32 columns, which every method can make."""

_LONGEST = 8192  # tokens in a piece: attention takes memory by its square


@dataclass(frozen=True)
class Options:
    """method: one of `METHODS`. bits, group: of the codes; for "mixed" bits are an average of all that a matrix takes;
    group 0 is a whole row, None the largest of `GROUPS` that fits. symmetric: no zero points; None: what the method's
    files usually have. act_order: for gptq in safetensors, where None is True. samples, length: how many pieces of how
    many tokens of the calibration texts; seed: which. gguf_type: for GGUF files, else None.
    """

    method: str = "gptq"
    bits: float = 4
    group: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    samples: int = 128
    length: int = 512
    seed: int = 0
    gguf_type: str | None = None

    @property
    def needs_texts(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != "rtn"

    @property
    def weighs_errors(self) -> bool:
        """Whether errors are weighed by how much a column counts: of all that rounds, GGUF types with codes."""
        return self.method == "rtn" and self.gguf_type not in (None, "F16", "BF16")

    @property
    def uses_texts(self) -> bool:
        """Whether texts change what is made."""
        return self.needs_texts or self.weighs_errors

    @property
    def is_symmetric(self) -> bool:
        """Whether codes have no zero points: by default all but AWQ's, as other tools have it."""
        return self.method != "awq" if self.symmetric is None else self.symmetric

    @property
    def is_ordered(self) -> bool:
        """Whether columns are quantised in the order of their weight."""
        return self.method == "gptq" and self.gguf_type is None and self.act_order is not False

    def settings(self) -> dict[str, Any]:
        """All that decides what is made of a model, and of tokens where there are any."""
        if self.gguf_type is not None:
            return {"method": self.method, "gguf_type": self.gguf_type}
        if self.method == "mixed":
            return {"method": self.method, "bits": self.bits}
        own = {"group": self.group, "symmetric": self.is_symmetric, "act_order": self.is_ordered}
        return {"method": self.method, "bits": self.bits, **own}

    def check(self) -> None:
        """Raise InputError for values that cannot be, or not together, or would change nothing."""
        if self.method not in METHODS:
            raise InputError(f"--method {self.method!r} is not known; choose one of {', '.join(METHODS)}")
        if self.method == "mixed":
            self._check_mixed()
        elif self.bits not in BITS:
            raise InputError(f"--bits {self.bits:g}: --method {self.method} makes {', '.join(map(str, BITS))}")
        for flag, number, least, most in (
            ("--samples", self.samples, 1, 1 << 20),
            ("--length", self.length, 2, _LONGEST),
            ("--seed", self.seed, 0, 1 << 63),
        ):
            if not least <= number <= most:
                raise InputError(f"{flag} must be from {least} to {most:,}, not {number:,}")
        if self.group is not None and (self.group < 0 or self.group % CELL):
            raise InputError(f"--group-size must be a multiple of {CELL}, or 0 for whole rows, not {self.group}")
        if self.act_order is not None and (self.method != "gptq" or self.gguf_type is not None):
            raise InputError("--act-order and --no-act-order are for --method gptq with --format safetensors")
        if self.gguf_type is not None:
            self._check_gguf(self.gguf_type)

    def _check_gguf(self, name: str) -> None:
        if self.method != "rtn" and name not in BLOCK_TYPES:
            raise InputError(
                f"--method {self.method} makes the types {', '.join(BLOCK_TYPES)} of GGUF, not {name}; choose one of "
                "those, or --method rtn"
            )
        if self.group is not None or self.symmetric is not None:
            raise InputError(f"{name} says groups and zero points itself: leave --group-size, --sym and --asym")

    def _check_mixed(self) -> None:
        if not 2 <= self.bits <= 8:
            raise InputError(f"--bits {self.bits:g}: --method mixed makes 2 to 8 on average")
        if self.gguf_type is not None or self.group is not None or self.symmetric is not None:
            raise InputError(
                "--method mixed chooses groups itself and writes EXL2: leave --group-size, --sym and --format"
            )

    def grid(self, config: ModelConfig, search: bool = False) -> Grid:
        """What codes of the layers' matrices are worth. Raises InputError for groups that do not divide their rows."""
        if self.gguf_type is not None:
            return BlockGrid(self.gguf_type, search)
        return IntegerGrid(int(self.bits), self.fitting_group(config), self.is_symmetric, search)

    def check_model(self, config: ModelConfig) -> None:
        """Raise InputError for a model of whose shapes these options cannot make anything."""
        if self.method == "mixed":
            _widths(config)
            require_bits(config, self.bits)
        elif self.gguf_type is None:
            self.fitting_group(config)

    def fitting_group(self, config: ModelConfig) -> int:
        """The size of a group. Raises InputError where it does not divide the rows of all matrices."""
        widths = _widths(config)
        if self.group is None:
            return next(group for group in GROUPS if _divides(group, widths))
        if self.group and not _divides(self.group, widths):
            fits = ", ".join(str(group) for group in (256, *GROUPS) if _divides(group, widths))
            raise InputError(
                f"--group-size {self.group} does not divide the rows of this model, which have "
                f"{' and '.join(map(str, widths))} columns; choose one of {fits}, or 0 for whole rows"
            )
        return self.group

    def walker(
        self,
        config: ModelConfig,
        recipes: Mapping[str, Recipe] | None = None,
        importance: Mapping[str, Floats] | None = None,
    ) -> Method:
        """The method, ready for `walk`. recipes: for "mixed", of each matrix; importance: see `Rounding`."""
        if self.method == "gptq":
            search = self.gguf_type is None and self.bits <= _SEARCHED_BITS
            return Gptq(self.grid(config, search), self.is_ordered)
        if self.method == "mixed":
            return Mixed(dict(recipes or {}))
        if self.method == "awq":
            return Awq(self.grid(config), self.grid(config, search=True))
        return Rtn(self.grid(config)) if self.gguf_type is None else Rounding(self.gguf_type, importance or {})


def _divides(group: int, widths: Sequence[int]) -> bool:
    return all(width % group == 0 for width in widths)


def _widths(config: ModelConfig) -> list[int]:
    """Columns that matrices of a layer have. Raises InputError for numbers that no quantised matrix can have."""
    widths = sorted({columns for _, columns in shapes(config).values()})
    if not _divides(CELL, widths):
        raise InputError(
            f"matrices of this model have {' and '.join(map(str, widths))} columns, and quantised ones need a multiple "
            f"of {CELL}"
        )
    return widths
