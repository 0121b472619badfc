"""Steps in a library process: what is left of states where something goes wrong, beside the engines' contract."""

import os
import pickle

import pytest

from ctxflow.host.call_results import States, StepEntry
from ctxflow.host.call_surroundings import digest_of, state_path


def count(states, prompts):
    return [((state or 0) + 1, (state or 0) + 1) for state in states]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "sessions")


def states(leaving=False):
    return States(lambda: leaving, lambda: None)


def step(here, folder, *entries, function=count):
    outcomes, results = here.step(function, [], entries, folder)
    return outcomes, [
        tuple(None if each is None else pickle.loads(each) for each in pair) for pair in pickle.loads(results)
    ]


def test_a_state_for_which_there_is_no_room_is_kept_beside_the_worker(tmp_path):
    (tmp_path / "file").write_text("no folder")
    here = states()
    outcomes, results = step(here, str(tmp_path / "file" / "sessions"), StepEntry(1, "anew", 0, True, "freeze"))
    assert sorted(outcomes[0]) == ["kept", "made"] and results == [(1, 1)]


def test_where_the_worker_has_notice_what_a_step_changed_is_kept(folder):
    outcomes, results = step(states(leaving=True), folder, StepEntry(1, "anew", 0, True, ""))
    assert sorted(outcomes[0]) == ["kept", "made"] and results == [(1, 1)]


def test_a_frozen_state_stays_in_the_cache_until_the_step_it_was_thawed_for_has_ended(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"))
    with open(state_path(folder, 1, 1), "rb") as file:
        digest = digest_of(file.read())
    thawed = StepEntry(1, "frozen", 1, True, "", (), b"", digest)

    def bad(states, prompts):
        raise ValueError

    with pytest.raises(ValueError):
        here.step(bad, [], [thawed], folder)
    assert step(here, folder, thawed)[1] == [(2, None)]
    assert os.listdir(folder) == []


def test_a_frozen_state_is_brought_out_unopened(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"))
    with open(state_path(folder, 1, 1), "wb") as file:
        file.write(b"no pickle")
    outcomes, results = here.step(
        count, [], [StepEntry(1, "frozen", 1, False, "leave", (), b"", digest_of(b""))], folder
    )
    assert list(outcomes[0]) == ["lost"], "it is not what was frozen"
    with open(state_path(folder, 1, 1), "wb") as file:
        file.write(b"no pickle")
    out = StepEntry(1, "frozen", 1, False, "leave", (), b"", digest_of(b"no pickle"))
    outcomes, results = here.step(count, [], [out], folder)
    assert outcomes == [{"kept": 9}] and pickle.loads(results) == [(None, b"no pickle")]
    assert os.listdir(folder) == []


def test_dropping_takes_a_session_off_the_cache_and_no_other(folder):
    here = states()
    step(here, folder, StepEntry(1, "anew", 0, True, "freeze"), StepEntry(11, "anew", 0, True, "freeze"))
    step(here, folder, StepEntry(1, "", 0, False, "drop"))
    assert os.listdir(folder) == ["11-1.state"]


def test_a_prompt_that_cannot_be_opened_harms_its_session_alone(folder):
    outcomes, results = step(
        states(), folder, StepEntry(1, "anew", 0, True, "", (b"no pickle",)), StepEntry(2, "anew", 0, True, "")
    )
    assert "a prompt cannot be opened" in outcomes[0]["failure"]["message"] and results[1] == (1, None)


@pytest.mark.parametrize("made", [None, [1], [(1, 2), (1, 2)], "ab"])
def test_what_are_no_pairs_is_told(folder, made):
    with pytest.raises(TypeError, match="one pair of chunk and state for each"):
        states().step(lambda states, prompts: made, [], [StepEntry(1, "anew", 0, True, "")], folder)
