"""How much memory there is, and sizes in words."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prolepsis.errors import InputError


class _Files(NamedTuple):
    """Of a control group: two files, and fields of memory.stat: cached files, and what of them lies in no file."""

    limit: str
    used: str
    cache: str
    shared: str


_CGROUP, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_2 = _Files("memory.max", "memory.current", "file", "shmem")
_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_UNLIMITED = 1 << 62
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def free_memory() -> int:
    """Bytes that this process can take without swapping, as far as the system tells."""
    return min(_free_on_machine(), _free_in_group())


def require_memory(what: str, needed: int) -> None:
    """Raise InputError, which says that `what` needs them, unless `needed` bytes are free."""
    free = free_memory()
    if needed > free:
        raise InputError(f"{what} needs about {shown(needed)} of memory, but {shown(free)} are free")


def shown(count: int) -> str:
    """Bytes in MiB or GiB, for people."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def parse_size(text: str, what: str) -> int:
    """Bytes of "512MiB", "2 GiB", "1.5GB" or a plain number. InputError names `what`: a flag, say."""
    digits = text.strip()
    number = digits.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = digits[len(number) :].strip().upper()
    try:
        size = float(number) * _UNITS[unit]
        if not 0 < size < 1 << 60:
            raise ValueError
    except (ValueError, KeyError):
        raise InputError(f"{what} {text!r} is not a size; write for example 512MiB or 2GiB") from None
    return int(size)


def _free_on_machine() -> int:
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_group() -> int:
    """What the control groups leave that this process is in: its own (a container's, a service's) and those above."""
    return min((_left(directory, files) for directory, files in _groups()), default=_UNLIMITED)


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Where those groups would be; some are not there, as a container sees its own as the root."""
    try:
        lines = _MEMBERSHIP.read_bytes().split(b"\n")  # names of groups may hold anything else
    except OSError:
        return
    for line in filter(None, lines):
        _, controllers, path = os.fsdecode(line).split(":", 2)
        if not controllers:
            root, files = _CGROUP, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = _CGROUP / "memory", _VERSION_1
        else:
            continue
        names = path.strip("/").split("/")
        for depth in range(len(names) + 1):
            yield root.joinpath(*names[:depth]), files


def _left(directory: Path, files: _Files) -> int:
    """What a group leaves; file cache counts as free, since it goes when memory is wanted: not so files in memory."""
    try:
        limit = int((directory / files.limit).read_text())
        used = int((directory / files.used).read_text())
        fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        cache = int(fields[files.cache]) - int(fields.get(files.shared, 0))
        return max(limit - used + cache, 0)
    except (OSError, ValueError, KeyError):
        return _UNLIMITED
