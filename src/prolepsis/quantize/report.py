"""What came of a job: where the bits went."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from prolepsis.quantize.names import part_of
from prolepsis.quantize.stored import Stored


class Row(NamedTuple):
    """Matrices of one kind: weights in all of them, bytes that they take with scales and zero points, and in how many
    bits of codes."""

    part: str
    weights: int
    nbytes: int
    kinds: tuple[str, ...]

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.nbytes / self.weights


class Report(NamedTuple):
    """path: what was made. rows: by kind of matrix, embedding and head last. layers: bits a weight of each layer's
    matrices. seconds: of the run, without those of earlier ones that it went on from."""

    path: str
    nbytes: int
    seconds: float
    tokens: int
    rows: list[Row]
    layers: list[float]

    @property
    def bits(self) -> float:
        """Bits a weight of all matrices."""
        return 8 * sum(row.nbytes for row in self.rows) / sum(row.weights for row in self.rows)

    @property
    def layer_bits(self) -> float:
        """Bits a weight of the layers' matrices."""
        rows = [row for row in self.rows if not row.part.startswith(("token_embd", "output"))]
        return 8 * sum(row.nbytes for row in rows) / sum(row.weights for row in rows)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [{**row._asdict(), "bits_per_weight": row.bits} for row in self.rows]
        return {
            **self._asdict(),
            "rows": rows,
            "bits_per_weight": self.bits,
            "layer_bits_per_weight": self.layer_bits,
        }


def entry(name: str, shape: tuple[int, int], kinds: Sequence[str], stored: Sequence[Stored]) -> dict[str, Any]:
    """What is kept of a matrix for the report."""
    nbytes = sum(tensor.nbytes for tensor in stored)
    return {"name": name, "weights": shape[0] * shape[1], "nbytes": nbytes, "kinds": list(kinds)}


def rows_of(entries: Sequence[dict[str, Any]]) -> tuple[list[Row], list[float]]:
    """Entries by kind of matrix, and bits a weight of each layer."""
    parts: dict[str, list[dict[str, Any]]] = {}
    layers: dict[str, list[dict[str, Any]]] = {}
    for each in entries:
        parts.setdefault(part_of(each["name"]), []).append(each)
        if each["name"].startswith("blk."):
            layers.setdefault(each["name"].split(".")[1], []).append(each)
    rows = [
        Row(
            part,
            sum(each["weights"] for each in group),
            sum(each["nbytes"] for each in group),
            tuple(sorted({kind for each in group for kind in each["kinds"]})),
        )
        for part, group in parts.items()
    ]
    return rows, [8 * sum(e["nbytes"] for e in group) / sum(e["weights"] for e in group) for group in layers.values()]
