"""The report of `kv bench` as a picture: ratio against speed. Needs matplotlib."""

from collections.abc import Mapping
from typing import Any


def draw(report: Mapping[str, Any]) -> Any:
    raise NotImplementedError
