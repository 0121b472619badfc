"""Games in processes of their own: strangers' policies play, and what they do there harms nobody else."""

import multiprocessing
import os
from pathlib import Path

import pytest

from ctxflow.errors import UsageError
from ctxflow.league import tournament
from ctxflow.league.contests import contest_of
from ctxflow.league.tournament import entrants, games_of, play, play_all, ratios_of

HERE = Path(__file__).parent / "strange_policies.py"
WORKLOAD = "many-models"


def games(text, seeds=(1,), workloads=(WORKLOAD,), family="routing"):
    return games_of(contest_of(family), entrants(family, text), workloads, seeds)


def of(name):
    return f"{HERE}:{name}"


def results(text, **limits):
    return {each.game.entrant.name.rpartition(":")[2]: each for each in play_all(games(text), **limits)}


def test_a_game_is_the_same_each_time_in_whichever_process():
    (game,) = games("context-affinity")
    (result,) = play_all([game])
    assert result.failure == "" and result.outcome == play(game) == play(game)
    assert result.seconds > 0


def test_a_strangers_file_plays_as_the_same_policy_by_name_does():
    found = results(f"context-affinity,{of('Nearest')},{{policy='{of('Nearest')}', wait=2.0}}")
    assert len({repr(each.outcome) for each in found.values()}) == 1
    assert all(each.failure == "" for each in found.values())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Raising", "it raised RuntimeError: no idea where to (strange_policies.py, line 27)"),
        ("Dying", "its process was ended by SIGSEGV"),
        ("Leaving", "its process ended with status 7"),
        ("Missing", "it raised AttributeError: module 'strange_policies' has no attribute 'Missing'"),
        ("NOT_A_POLICY", "it raised TypeError: 'int' object is not callable"),
    ],
)
def test_who_crashes_loses_with_the_reason_and_the_others_play_on(name, reason):
    found = results(f"{of(name)},least-loaded")
    assert found[name].outcome is None and found[name].failure.startswith(reason)
    assert found["least-loaded"].outcome is not None


@pytest.mark.release
def test_who_is_not_done_within_the_limits_loses(monkeypatch):
    found = results(f"{of('Spinning')},{of('Idle')},least-loaded", seconds=10)
    assert found["Spinning"].failure == "it took more processor time than a game may"
    assert "left after 4 h of virtual time" in found["Idle"].failure
    assert found["least-loaded"].outcome is not None
    assert "not done after 500 events" in results("least-loaded", steps=500)["least-loaded"].failure
    monkeypatch.setattr(tournament, "PATIENCE", 1)
    assert results(of("Sleeping"), seconds=3)["Sleeping"].failure == "it was not done after 3 s"


def test_who_lost_a_game_plays_no_more_and_the_others_play_all():
    asked = games(f"{of('Leaving')},least-loaded", seeds=(1, 2, 3))
    found = list(play_all(asked))
    names = [each.game.entrant.name.rpartition(":")[2] for each in found]
    assert names.count("least-loaded") == 3
    assert names.count("Leaving") <= len(os.sched_getaffinity(0))
    ratios, failures = ratios_of(found)
    assert list(ratios) == ["least-loaded"] and list(failures) == [of("Leaving")]
    assert failures[of("Leaving")] == f"on {WORKLOAD}, seed 1, its process ended with status 7"


def test_when_it_is_closed_no_process_is_left():
    playing = play_all(games(f"least-loaded,{of('Sleeping')}"))
    assert next(playing).outcome is not None
    playing.close()
    assert multiprocessing.active_children() == []


def test_all_that_are_installed_play_unless_some_are_named():
    assert [each.name for each in entrants("sessions", None)] == ["least-loaded", "turboserve"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tortoise", "no routing policy 'tortoise'"),
        ("nowhere.py:Nearest", "there is no file nowhere.py"),
        ("torta,torta", "named twice"),
        ("{size=3}", "is no policy"),
        ("torta,,skylb", "is no sweep"),
    ],
)
def test_who_is_not_there_is_refused_before_anything_is_played(text, says):
    with pytest.raises(UsageError, match=says):
        entrants("routing", text)
    with pytest.raises(UsageError, match="did you mean 'many-models'"):
        contest_of("routing").workload("many-model")
    with pytest.raises(UsageError, match="no family 'rooting'"):
        contest_of("rooting")
