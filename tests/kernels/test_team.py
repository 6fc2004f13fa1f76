"""Sections are worked through exactly once each, whoever helps, comes late, or does not come at all."""

import os
import threading

import numpy as np
import pytest
from numba import njit

from prolepsis.errors import InputError
from prolepsis.kernels.team import JOB, MAX_THREADS, Team, arrive, default_threads, finish, idle, join, publish, take


@njit(nogil=True)
def _count(control, generation, leader, sections, counts):
    """Leader and helper alike: item i of section s adds 1 to counts[s, i]; the section is the parameter at JOB."""
    if not leader and not arrive(control, generation):
        return
    section, waited = 0, 0
    while True:
        items = 0
        if leader:
            if section == sections:
                return
            items = 1 + (7 * section) % counts.shape[1]
            control[JOB] = section
            publish(control, items)
            section += 1
        elif not idle(control, waited):
            return
        waited += 1
        item = take(control)
        while item >= 0:
            counts[control[JOB], item] += 1
            finish(control, 1)
            waited = 0
            item = take(control)
        if leader:
            join(control, items)


def _help(control, generation, counts):
    _count(control, generation, False, 0, counts)


def _lead(team, counts):
    team.begin()
    try:
        _count(team.control, 0, True, len(counts), counts)
    finally:
        team.end()


def _expected(sections, width):
    return (np.arange(width) < 1 + (7 * np.arange(sections)[:, None]) % width).astype(np.int64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_runs_once(threads):
    team = Team(threads, _help)
    counts = np.zeros((3000, 61), np.int64)
    team.bind(counts)
    for _ in range(3):
        counts[:] = 0
        _lead(team, counts)
        np.testing.assert_array_equal(counts, _expected(*counts.shape))


def test_replaced_arguments_are_never_touched_again():
    team = Team(3, _help)
    for width in range(5, 45):
        counts = np.zeros((50, width), np.int64)
        team.bind(counts)
        _lead(team, counts)
        done = counts.copy()
        np.testing.assert_array_equal(done, _expected(*counts.shape))
        following = np.zeros((50, width + 1), np.int64)
        team.bind(following)
        _lead(team, following)
        np.testing.assert_array_equal(counts, done)


def test_a_pass_does_not_wait_for_helpers_that_never_come(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    team = Team(4, _help)
    counts = np.zeros((200, 9), np.int64)
    team.bind(counts)
    _lead(team, counts)
    np.testing.assert_array_equal(counts, _expected(*counts.shape))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_goes_on_with_helpers_of_its_own():
    team = Team(3, _help)
    counts = np.zeros((300, 33), np.int64)
    team.bind(counts)
    _lead(team, counts)
    child = os.fork()
    if child == 0:
        counts[:] = 0
        _lead(team, counts)
        os._exit(0 if np.array_equal(counts, _expected(*counts.shape)) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_helpers_leave_with_their_team():
    others = set(threading.enumerate())
    team = Team(3, _help)
    counts = np.zeros((10, 5), np.int64)
    team.bind(counts)
    _lead(team, counts)
    helpers = set(threading.enumerate()) - others
    assert len(helpers) == 2
    del team
    for helper in helpers:
        helper.join(timeout=30)
        assert not helper.is_alive()


def test_threads_follow_the_environment(monkeypatch):
    monkeypatch.setenv("PROLEPSIS_THREADS", "1")
    assert default_threads() == 1
    monkeypatch.setenv("PROLEPSIS_THREADS", "7")
    assert default_threads() == 7
    monkeypatch.delenv("PROLEPSIS_THREADS")
    assert 1 <= default_threads() <= MAX_THREADS
    for wrong in ("nonsense", "0", "257", "99999", "-1", "1.5"):
        monkeypatch.setenv("PROLEPSIS_THREADS", wrong)
        with pytest.raises(InputError, match="PROLEPSIS_THREADS must be in"):
            default_threads()
