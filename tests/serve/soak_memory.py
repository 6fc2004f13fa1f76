"""What a process holds: what is in use, and what its allocators keep beside it for later."""

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20


class Memory(NamedTuple):
    """At one moment, without garbage."""

    resident: int
    """Bytes of real memory. Allocators keep what was freed, in as many pieces as there were threads."""
    malloc: int | None
    """Bytes in use of the C library's allocator: arrays, and what libraries hold. None: it does not tell."""
    blocks: int
    """Blocks in use of Python's allocator: all small objects."""

    @staticmethod
    def now() -> "Memory":
        """That of this process."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Memory(resident, _malloc_bytes(), sys.getallocatedblocks())

    def __str__(self) -> str:
        malloc = "?" if self.malloc is None else f"{self.malloc / MIB:.1f}"
        return f"{self.resident / MIB:.0f}/{malloc}/{self.blocks}"


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _malloc_bytes() -> int | None:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # not glibc, or one before 2.33
        return None
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
