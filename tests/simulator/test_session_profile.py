"""The profile of a run's sessions: what its event log says, windows of it, and the shares that suit them."""

import json

import pytest

from ctxflow.simulator.scaling_profile import cut, fitted, profiled_sessions, read_sessions

SLOW = ((1, 0.4), (2, 0.8), (4, 1.6))  # A quarter of the steps are to be simulated.


def log(happenings, steps=((1, 0.1), (2, 0.2), (4, 0.4)), maximum=8, boot=None):
    """Lines of an event log: (time, session, "opened" or "turn" or "closed"), and steps of so many chunks."""
    tier = {"is": "TierSpec", "name": "t", "maximum": maximum, "boot_seconds": boot}
    lines = ['{"run":{}}\n', _line({"is": "TierOffered", "time": 0.0, "tier": tier})]
    for count, seconds in steps:
        outcomes = [{"made": 1, "kept": 100}] * count
        lines.append(_line({"is": "StepFinished", "time": 0.0, "seconds": seconds, "outcomes": outcomes}))
    for time, session, what in happenings:
        kind = {"opened": "SessionOpened", "turn": "Tick", "closed": "SessionClosed"}[what]
        commands = [{"is": "EndTurn", "session": session, "prompts": 0}] if what == "turn" else []
        lines.append(_line({"is": kind, "time": time, "session": session}, commands))
    return lines


def _line(event, commands=()):
    return json.dumps({"event": event, "commands": list(commands)}) + "\n"


def test_a_log_says_who_had_something_to_do_and_how_long_steps_took():
    run = read_sessions(log([(1.0, 5, "opened"), (3.0, 5, "turn"), (4.0, 5, "closed")], boot=20.0))
    assert run.events == [(1.0, 5, True), (3.0, 5, False)]
    assert (run.steps, run.state_bytes, run.workers, run.boot_seconds) == ({1: 0.1, 2: 0.2, 4: 0.4}, 100.0, 8, 20.0)
    assert run.curve(3) == pytest.approx(0.3)


def test_a_log_that_ends_within_a_line_counts_to_there_and_other_nonsense_is_told():
    assert read_sessions([*log([(1.0, 5, "opened")]), '{"event": {"is"']).events == [(1.0, 5, True)]
    with pytest.raises(ValueError, match="line 2 is no line of an event log"):
        read_sessions(['{"run":{}}\n', "nonsense\n"])


def test_the_line_through_what_was_measured_rises():
    assert fitted({2: 0.2}).each > 0
    assert fitted({1: 0.3, 8: 0.2}).each > 0  # Noise: chunks do not get shorter with more sessions.


def test_a_window_begins_with_those_who_are_there():
    run = read_sessions(log([(1.0, 5, "opened"), (2.0, 6, "opened"), (5.0, 5, "closed"), (12.0, 6, "closed")]))
    trace = cut(run, 4.0, 10.0)
    assert trace.events == [(0.0, 0, True), (0.0, 1, True), (1.0, 0, False)]
    assert trace.seconds == 6.0


def test_the_cheapest_share_that_keeps_the_target_is_taken():
    calm = [(0.0, n, "opened") for n in range(4)] + [(600.0, n, "closed") for n in range(4)]
    burst = [(700.0 + 8 * n, 10 + n, "opened") for n in range(20)] + [(1200.0, 10 + n, "closed") for n in range(20)]
    run = read_sessions(log(calm + burst, SLOW))
    rows = profiled_sessions(run, 2.0, 620.0, (0.5, 1.0), 0.05, 30.0)
    assert [row.volatility for row in rows] == sorted(row.volatility for row in rows)
    assert rows[0].parameters.utilization == 1.0 and rows[0].valid
    assert rows[-1].parameters.utilization < 1.0 and rows[-1].valid


def test_where_no_share_keeps_the_target_the_one_that_exceeds_it_least_is_taken():
    # All 24 begin on one worker whatever the share, for a boot time; how long they stay crowded depends on it.
    crowd = [(100.0 + n / 100, n, "opened") for n in range(24)] + [(400.0 + n, n, "closed") for n in range(24)]
    run = read_sessions(log(crowd, SLOW))
    shares = (0.25, 1.0, 1.6)
    (row,) = profiled_sessions(run, 2.0, 620.0, shares, 0.05, 30.0)
    alone = [profiled_sessions(run, 2.0, 620.0, (share,), 0.05, 30.0)[0] for share in shares]
    assert not any(each.valid for each in (row, *alone))
    assert len({each.replayed.worst for each in alone}) == 1
    assert row.replayed.over == min(each.replayed.over for each in alone) < alone[-1].replayed.over
    assert row.parameters.utilization == 1.0  # The first two exceed it equally, and the first costs more.


def test_what_cannot_be_profiled_is_told():
    with pytest.raises(ValueError, match="no session of the run made a chunk"):
        profiled_sessions(read_sessions(log([(1.0, 5, "opened")], steps=())), 1.0, 60.0, (0.5,), 0.1, 30.0)
    with pytest.raises(ValueError, match="one session alone takes"):
        profiled_sessions(read_sessions(log([(1.0, 5, "opened")])), 0.01, 60.0, (0.5,), 0.1, 30.0)
