"""Threads that share the loops of one compiled program.

A *section* is a number of independent items. The leading thread publishes it and takes items itself; helpers that
happen to be running take items too. The leader waits only for items already taken, never for a helper to arrive: where
another program has the second core, a pass takes as long as on one core, while a fork-and-join loop (OpenMP) would
stand still for a time slice at every join. Which thread runs an item never shows in the result.

All state is in one int64 array, `control`, on cache lines of its own. The claim word holds a section's number, its
item count and the next item, so that one atomic addition both takes an item and says of which section.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels.cpu import features

MAX_THREADS = 256
_LINE = 8  # int64 in a cache line of 64 bytes
_CLAIM, _DONE, _ACTIVE, _BUSY, _SECTION, _GENERATION = (line * _LINE for line in range(6))
_REST = _BUSY + 1  # whether helpers are to go to sleep at once when a pass has ended
JOB = 6 * _LINE
"""Where the parameters of the current section begin; they may be read by whoever has taken an item of it."""
JOB_WORDS = 16
_SIZE = JOB + 2 * _LINE

_COUNT_BITS = 24
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_SECTION_MASK = (1 << 15) - 1
_PATIENCE = 20_000  # pauses without work before a helper goes to sleep: about a millisecond

_WORD = ir.IntType(64)


def _address(context, builder, signature, args):
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def atomic_add(tyctx, array, index, value):
    """array[index] += value, sequentially consistent; returns the value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _address(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def atomic_load(tyctx, array, index):
    """array[index], sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_address(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def atomic_store(tyctx, array, index, value):
    """array[index] = value, sequentially consistent."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[2], _address(context, builder, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def _pause(tyctx):
    """Tell the core that this is a waiting loop, where it has a way to be told."""

    def codegen(context, builder, signature, args):
        if "sse2" in features():
            signature = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), signature), [])
        return context.get_dummy_value()

    return types.void(), codegen


_yield_core = types.ExternalFunction("sched_yield", types.int32())


@njit(cache=True)
def publish(control, items):
    """Begin a section of `items` items (below 2**24) whose parameters are at control[JOB:]; leader only."""
    section = (control[_SECTION] + 1) & _SECTION_MASK
    control[_SECTION] = section
    atomic_store(control, _DONE, 0)
    atomic_store(control, _CLAIM, section << (2 * _COUNT_BITS) | items << _COUNT_BITS)


@njit(cache=True)
def take(control):
    """The next item of the current section, now the caller's to run and then to `finish`; -1 where none is left."""
    word = atomic_load(control, _CLAIM)
    if word & _COUNT_MASK >= word >> _COUNT_BITS & _COUNT_MASK:
        return np.int64(-1)
    word = atomic_add(control, _CLAIM, 1)
    item = word & _COUNT_MASK
    return item if item < word >> _COUNT_BITS & _COUNT_MASK else np.int64(-1)


@njit(cache=True)
def finish(control, items):
    """Count items as done."""
    atomic_add(control, _DONE, items)


@njit(cache=True)
def join(control, items):
    """Wait until all items of the section are done; leader only."""
    waited = 0
    while atomic_load(control, _DONE) < items:
        _pause()
        waited += 1
        if waited % 256 == 0:
            _yield_core()


@njit(cache=True)
def idle(control, waited):
    """One turn of a helper's waiting loop, the `waited`-th without work. False: leave, no pass is running."""
    _pause()
    if waited % 1024 == 1023:
        _yield_core()
    patient = waited < _PATIENCE and atomic_load(control, _REST) == 0
    if patient or atomic_load(control, _BUSY) != 0:
        return True
    atomic_add(control, _ACTIVE, -1)
    # A pass that began just now has either seen that we left and wakes us, or is seen here.
    if atomic_load(control, _BUSY) == 0:
        return False
    atomic_add(control, _ACTIVE, 1)
    return True


@njit(cache=True)
def arrive(control, generation):
    """A helper is here with the arguments of `generation`. False: they have been replaced, leave."""
    atomic_add(control, _ACTIVE, 1)
    if atomic_load(control, _GENERATION) == generation:
        return True
    atomic_add(control, _ACTIVE, -1)
    return False


@njit(cache=True)
def _begin(control):
    atomic_store(control, _REST, 0)
    atomic_store(control, _BUSY, 1)
    return atomic_load(control, _ACTIVE)


@njit(cache=True)
def _end(control):
    atomic_store(control, _BUSY, 0)


@njit(cache=True)
def _rest(control):
    atomic_store(control, _REST, 1)


@njit(cache=True)
def _replace(control, generation):
    """Make the arguments of helpers invalid; returns how many are still about."""
    atomic_store(control, _GENERATION, generation)
    return atomic_load(control, _ACTIVE)


def default_threads() -> int:
    """$PROLEPSIS_THREADS, or one for each core this process may use. Raises InputError for a number out of range."""
    asked = os.environ.get("PROLEPSIS_THREADS")
    if not asked:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_THREADS)
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:4]) <= MAX_THREADS):
        raise InputError(f"$PROLEPSIS_THREADS must be in 1 .. {MAX_THREADS}, not {asked!r}")
    return int(asked)


class Team:
    """The helpers of one leader. They sleep between passes, and wake or spin during one.

    `help_(control, generation, *arguments)`, a compiled function that releases the interpreter lock, is a helper's
    share: `arrive`, then `take`, run and `finish` items for as long as `idle` says to wait for more.
    """

    def __init__(self, threads: int, help_: Callable[..., None]) -> None:
        self.control: NDArray[np.int64] = np.zeros(_SIZE, np.int64)
        self._helpers = threads - 1
        self._help = help_
        self._bound: tuple[int, tuple[Any, ...]] = (0, ())
        self._wake = threading.Semaphore(0)
        self._process = 0
        weakref.finalize(self, _dismiss, self._wake, self._helpers)

    def bind(self, *arguments: object) -> None:
        """What helpers are to work with from now on; between passes only."""
        self._adopt()
        generation = self._bound[0] + 1
        while _replace(self.control, generation):
            time.sleep(1e-4)
        self._bound = (generation, arguments)

    def begin(self) -> None:
        """Start a pass: helpers are woken unless they are still about.

        Those of the team that was last at work go to sleep: waiting for more, they would keep a core from ours.
        """
        global _at_work
        self._adopt()
        other, _at_work = _at_work(), weakref.ref(self)
        if other is not None and other is not self:
            _rest(other.control)
        for _ in range(self._helpers - _begin(self.control)):
            self._wake.release()

    def end(self) -> None:
        """End a pass: helpers may go to sleep."""
        _end(self.control)

    def _adopt(self) -> None:
        """Start the threads; once more in a forked child, which has none of its parent's."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self.control[:JOB] = 0
        self.control[_GENERATION] = self._bound[0]
        for _ in range(self._helpers):
            threading.Thread(target=_serve, args=(weakref.ref(self), self._wake), daemon=True).start()


def _nobody() -> Team | None:
    return None


_at_work: Callable[[], Team | None] = _nobody
"""The team that began a pass last."""


def _serve(team_of: "weakref.ref[Team]", wake: threading.Semaphore) -> None:
    while True:
        wake.acquire()
        team = team_of()
        if team is None:
            return
        generation, arguments = team._bound
        team._help(team.control, generation, *arguments)
        del team, arguments


def _dismiss(wake: threading.Semaphore, helpers: int) -> None:
    for _ in range(helpers):
        wake.release()
