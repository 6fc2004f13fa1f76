"""How much memory there is, and sizes in words."""

import os
from pathlib import Path

from prolepsis.errors import InputError

_CGROUP = Path("/sys/fs/cgroup")
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
    """What the control group of a container leaves; file cache counts as free, since it goes when memory is wanted."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cache = [
            line.split()[1] for line in (_CGROUP / "memory.stat").read_text().splitlines() if line.startswith("file ")
        ]
        return max(limit - used + sum(map(int, cache)), 0)
    except (OSError, ValueError):
        return 1 << 62
