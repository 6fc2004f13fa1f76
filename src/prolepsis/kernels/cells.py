"""How weights and activations lie in memory for the products of `tile`: sizes that all who read or write them share.

A weight matrix is held in *tiles* of 16 rows, which are the lanes of every vector. A tile is a run of *groups*, each a
header and then *cells* of 32 columns; in kinds whose scale belongs to 32 columns, a group is one cell. All numbers of a
header are for 16 rows, lane after lane:

- of a group: float16 scales; float16 minimums or uint8 zero points, where the kind has them;
- of a cell: for each part of its columns an int8 that scales are multiplied by, then uint8 for minimums likewise;
- then the codes, in *planes* of 8, 4, 2 or 1 bits that together make a code, the lowest bits first. Four columns are
  one 64-byte vector of bytes (lane, column). In one vector, a plane of 4 bits holds the bits of v and v + 4, of 2 bits
  those of v, v + 1, v + 2 and v + 3, of 1 bit those of all 8.

Float kinds have no header: a cell is 32 columns of 16 numbers.
"""

from prolepsis.kernels.kinds import FREE, KINDS, Kind
from prolepsis.kernels.llvm import LANES

CELL = 32  # columns in a cell: one block of quantised activations
PLANES = 2  # bytes of a quantised activation

# The words of a cell's activation record (`rows.quantise_row` writes them): float32 scale, float32 scale times
# the sum of quants, then minus the sum of the first 16 quants, of the last 16 and of all 32, as int32.
RECORD = 5

CODES = {name: code for code, name in enumerate(KINDS)}
"""The numbers by which compiled code knows kinds."""

_PLANES_OF = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}


def is_float(kind: Kind) -> bool:
    """Whether weights are floats, and not codes."""
    return kind.group == 1


def quantised_codes(bits: int) -> tuple[int, ...]:
    """Kinds whose codes have so many bits or fewer."""
    return tuple(CODES[name] for name, kind in KINDS.items() if not is_float(kind) and kind.bits <= bits)


def planes_of(kind: Kind) -> tuple[int, ...]:
    """Bits of the planes of a kind of codes, the lowest first."""
    return _PLANES_OF[kind.bits]


def plane_bytes(bits: int) -> int:
    """Bytes of a plane in one cell."""
    return LANES * CELL * bits // 8


def group_bytes(kind: Kind) -> int:
    """Bytes of a group's header."""
    if is_float(kind):
        return 0
    return 2 * LANES * (1 + kind.minimums) + (LANES if kind.group == FREE else 0)


def parts_of(kind: Kind) -> int:
    """Parts of a cell that have whole numbers of their own."""
    return CELL // kind.part if kind.part else 0


def part_bytes(kind: Kind) -> int:
    """Bytes of a cell's header."""
    return LANES * parts_of(kind) * (1 + kind.minimums)


def cell_bytes(kind: Kind) -> int:
    """Bytes of a cell, its header included."""
    return part_bytes(kind) + plane_bytes(kind.bits)


def cells_of_group(kind: Kind, group: int) -> int:
    """Cells that share a scale; `group`: columns that do, where the kind leaves that free."""
    return max(1, (kind.group or group) // CELL)


def tile_bytes(name: str, columns: int, group: int = 0) -> int:
    """Bytes of a tile of so many columns, a multiple of 32."""
    kind = KINDS[name]
    groups = -(-columns // CELL // cells_of_group(kind, group))
    return groups * group_bytes(kind) + columns // CELL * cell_bytes(kind)
