"""Sections of work shared by the engine's own threads, for measuring single kernels as a pass runs them."""

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

from prolepsis.kernels.team import Team, arrive, finish, idle, join, publish, take

Step = Callable[..., Any]


@cache
def _loop(prepare: Step, run_item: Step) -> Step:
    """The compiled loop of leader and helpers, as `kernels.forward.run_pass` has it."""

    @njit(nogil=True)
    def loop(control, generation, threads, steps, work):
        leader = threads > 0
        if not leader and not arrive(control, generation):
            return
        step, waited, items = 0, 0, 0
        while True:
            if leader:
                if step == steps:
                    return
                items = prepare(control, step, threads, work)
                step += 1
                publish(control, items)
            elif not idle(control, waited):
                return
            waited += 1
            item = take(control)
            while item >= 0:
                run_item(control, item, work)
                waited = 0
                finish(control, 1)
                item = take(control)
            if leader:
                join(control, items)

    return loop


def shared(prepare: Step, run_item: Step, threads: int, *work: Any) -> Callable[[int], None]:
    """A call that runs a number of steps, each a section of items, on `threads` threads.

    prepare(control, step, threads, work): the leader sets the section's parameters and returns its number of items;
    run_item(control, item, work): any thread runs one. Both compiled.
    """
    loop = _loop(prepare, run_item)
    team = Team(threads, lambda control, generation, *work: loop(control, generation, 0, 0, work))
    team.bind(*work)

    def run(steps: int) -> None:
        team.begin()
        try:
            loop(team.control, 0, threads, steps, work)
        finally:
            team.end()

    return run
