"""Which CPU instructions the compiled kernels may use.

x86 instructions that LLVM cannot lower to anything else (gather, expand, vpdpbusd) abort the process at compile
time on a CPU that lacks them, so a kernel asks here *before* it compiles, and takes its generic form otherwise.
"""

from functools import cache

from numba import config
from numba.core.codegen import get_host_cpu_features


@cache
def features() -> frozenset[str]:
    """Names of the features Numba compiles for, as LLVM spells them ("avx2", "avx512f", "avx512vnni", ...).

    Follows Numba's own overrides: `NUMBA_CPU_FEATURES` ("+avx2,-avx512f") replaces what the host reports and
    `NUMBA_ENABLE_AVX=0` removes every AVX feature. `NUMBA_CPU_NAME` alone stands for a CPU about which nothing
    is known: the empty set, so that kernels take their generic form.
    """
    if config.CPU_FEATURES is not None:
        listed = config.CPU_FEATURES
    elif config.CPU_NAME is not None:
        listed = ""
    else:
        listed = get_host_cpu_features()
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


def has(*names: str) -> bool:
    """True when every named feature is there."""
    return features().issuperset(names)
