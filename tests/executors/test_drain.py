"""A live run leaves a host or a tier that a person names, and no row is lost by it."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.cli.app import app
from ctxflow.executors.figures import NAME, DrainRequests, TierBounds, ask, drained
from ctxflow.executors.kept_files import read_workers
from ctxflow.files import NotOwnError
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from waiting import eventually, joined


@context()
def place():
    return "there"


@batch_app(place(), batch_size=1)
def slow(_, items):
    time.sleep(0.05)
    return items


def state_of(*events):
    families = {"routing": "context-affinity", "batching": "fixed", "placement": "everywhere", "scaling": "fixed"}
    policies = Policies(
        preemption=make("preemption", "none"), **{each: make(each, name) for each, name in families.items()}
    )
    scheduler = Scheduler(policies)
    commands = [command for event in events for command in scheduler.handle(event)]
    return scheduler, commands


def pool(hosts=("one", "two"), tier="gpu"):
    """A scheduler with a worker on each host."""
    specs = [ev.WorkerSpec(f"{host}/1", host=host, machine=f"{host}.pool", tier=tier, gpus=1) for host in hosts]
    scheduler, commands = state_of(
        ev.TierOffered(0.0, ev.TierSpec(tier, maximum=len(hosts), gpus=1)),
        *(ev.WorkerJoined(1.0, spec) for spec in specs),
    )
    return scheduler, commands


def released(commands):
    return [command.worker for command in commands if isinstance(command, cmd.Release)]


def test_the_workers_of_a_host_go_none_is_asked_for_there_and_those_that_come_go_too():
    scheduler, _ = pool()
    commands = scheduler.handle(ev.HostDrained(2.0, "one"))
    assert released(commands) == ["one/1"]
    assert [(each.tier, each.hosts) for each in commands if isinstance(each, cmd.Exclude)] == [("gpu", ("one.pool",))]
    again = scheduler.handle(ev.WorkerJoined(3.0, ev.WorkerSpec("one/2", host="one", machine="one.pool", tier="gpu")))
    assert released(again) == ["one/2"]
    commands = scheduler.handle(ev.HostDrained(4.0, "one", drained=False))
    assert [each.hosts for each in commands if isinstance(each, cmd.Exclude)] == [()]
    third = scheduler.handle(ev.WorkerJoined(5.0, ev.WorkerSpec("one/3", host="one", machine="one.pool", tier="gpu")))
    assert released(third) == []


def test_a_person_s_word_counts_for_the_last_host_and_for_workers_started_by_hand_too():
    scheduler, _ = pool(hosts=("one",))
    scheduler.handle(ev.WorkerJoined(1.5, ev.WorkerSpec("hand", host="one", tier="gpu", acquired=False)))
    assert sorted(released(scheduler.handle(ev.HostDrained(2.0, "one")))) == ["hand", "one/1"]


def test_what_is_asked_is_told_once_and_undone(tmp_path):
    scheduler, _ = pool()
    requests = DrainRequests(str(tmp_path))

    def told(now):
        requests.look()
        heard = requests.events(scheduler.state, now)
        heard += bounds.events(scheduler.state, now, requests.tiers, {})
        for event in heard:
            scheduler.handle(event)
        return heard

    bounds = TierBounds()
    assert told(1.0) == []
    ask(str(tmp_path), ["one"], ["gpu", "nothing"])
    host, tier = told(2.0)
    assert host == ev.HostDrained(2.0, "one") and (tier.tier.name, tier.tier.maximum) == ("gpu", 0)
    assert told(3.0) == []
    ask(str(tmp_path), [], [])
    host, tier = told(4.0)
    assert host == ev.HostDrained(4.0, "one", drained=False) and tier.tier.maximum == 2


def test_what_others_may_have_written_is_not_obeyed(tmp_path):
    scheduler, _ = pool()
    (tmp_path / NAME).write_text(json.dumps({"hosts": ["one"]}))
    os.chmod(tmp_path / NAME, 0o666)
    requests = DrainRequests(str(tmp_path))
    requests.look()
    assert requests.events(scheduler.state, 1.0) == []
    with pytest.raises(NotOwnError):
        drained(str(tmp_path))
    (tmp_path / NAME).unlink()
    ask(str(tmp_path), ["one"], [])
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_tier_of_a_live_run_is_left_and_used_again_and_no_row_is_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ContextExecutor(workers=2) as executor:
        run = executor.calls.run.directory
        results: list[int] = []
        enough = threading.Event()
        items = itertools.takewhile(lambda _: not enough.is_set(), itertools.count())
        reader = threading.Thread(target=lambda: results.extend(slow.map(items, window=20)))
        reader.start()
        eventually(lambda: len(read_workers(run)) == 2 and len(results) > 10)
        told = CliRunner().invoke(app, ["drain", "local"])
        assert told.exit_code == 0 and "2 workers of tier local will leave" in told.output
        eventually(lambda: executor.status().workers == 0)
        before = executor.status().items_done
        assert CliRunner().invoke(app, ["drain", "local", "--undo"]).output == "local may be used again\n"
        eventually(lambda: executor.status().items_done > before)
        enough.set()
        joined(reader)
        status = executor.status()
        assert results == list(range(status.items_done))
        assert status.items_dead == status.crashes == 0
    assert not Path(run, NAME + ".new").exists()


def test_who_is_not_there_cannot_be_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ContextExecutor(workers=1) as executor:
        assert list(slow.map(range(3))) == [0, 1, 2]
        run = executor.calls.run.directory
        eventually(lambda: read_workers(run))
        refused = CliRunner().invoke(app, ["drain", "elsewhere"])
        assert refused.exit_code != 0 and "no tier elsewhere" in str(refused.exception or refused.output)
        refused = CliRunner().invoke(app, ["drain", "local", "--undo"])
        assert "is not drained" in str(refused.exception or refused.output)
    refused = CliRunner().invoke(app, ["drain", "local", run])
    assert "does not go on" in str(refused.exception or refused.output)
