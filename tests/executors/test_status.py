"""A run's figures at a moment, read off the scheduler's state."""

import dataclasses
import json

import pytest

from ctxflow.causes import ShortfallCause
from ctxflow.executors.figures import causes_of, figures_of, status_of
from ctxflow.executors.kept_files import RunStatusFile
from ctxflow.observe.progress import Progress
from ctxflow.policies.protocols import Verdict
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import events as ev

FAMILIES = {
    "routing": "context-affinity", "batching": "fixed", "placement": "everywhere", "preemption": "none",
    "scaling": "fixed",
}  # fmt: skip


def state_after(*events, **chosen):
    choices = {**FAMILIES, **chosen}
    scheduler = Scheduler(Policies(**{family: make(family, choice) for family, choice in choices.items()}))
    for event in events:
        scheduler.handle(event)
    return scheduler.state


def joined(time, name, tier, gpus):
    return ev.WorkerJoined(time, ev.WorkerSpec(name, tier=tier, gpus=gpus))


def test_hours_and_cost_count_workers_that_are_gone_and_those_that_are_here():
    state = state_after(
        ev.TierOffered(0.0, ev.TierSpec("a10", maximum=4, gpus=2, price=0.5)),
        ev.TierOffered(0.0, ev.TierSpec("idle", maximum=0, gpus=1)),
        joined(0.0, "one", "a10", 2),
        joined(1800.0, "two", "a10", 2),
        ev.WorkerLost(3600.0, "one", evicted=True),
    )
    status = status_of(state, {}, now=7200.0)
    tier = status.tiers["a10"]
    assert (tier.joined, tier.worker_seconds, tier.gpu_seconds) == (1, 3600 + 5400, 2 * (3600 + 5400))
    assert tier.cost == pytest.approx(0.5 * 2.5)
    figures = figures_of(status)
    assert (figures["gpu_hours"], figures["worker_hours"], figures["cost"]) == (5.0, 2.5, pytest.approx(1.25))
    assert (figures["workers"], figures["evictions"]) == (1, 1)


def test_there_is_no_cost_if_a_worker_has_no_price():
    state = state_after(
        ev.TierOffered(0.0, ev.TierSpec("a10", maximum=1, gpus=1, price=0.5)),
        joined(0.0, "one", "a10", 1),
        joined(0.0, "by hand", "elsewhere", 1),
    )
    figures = figures_of(status_of(state, {}, now=3600.0))
    assert figures["tiers"]["elsewhere"] == {
        "joined": 1, "asked": None, "gpu_hours": 1.0, "worker_hours": 1.0, "cost": None, "reason": "",
    }  # fmt: skip
    assert (figures["cost"], figures["gpu_hours"]) == (None, 2.0)


def test_sessions_count_by_what_they_do():
    state = state_after(
        ev.ContextDeclared(0.0, ev.ContextSpec("c", "model")),
        ev.AppDeclared(0.0, ev.AppSpec("talk", "talk", "c", batch=False, sessions=True)),
        *(ev.SessionOpened(0.0, number, "talk", wanted=number > 1) for number in range(1, 5)),
        ev.SessionSuspended(0.0, 4),
    )
    assert status_of(state, {}, now=1.0).sessions == {
        "running": 0, "waiting": 2, "migrating": 0, "idle": 1, "suspended": 1,
    }  # fmt: skip
    assert status_of(state_after(), {}, now=1.0).sessions == {}


def test_a_run_s_file_tells_how_fast_its_sessions_make_chunks(tmp_path):
    file, now = RunStatusFile(str(tmp_path)), status_of(state_after(), {}, now=0.0)
    for second in range(9):
        told = dataclasses.replace(now, time=float(second), chunks=5 * second, migrations=3, sessions={"running": 2})
        file.write(told)
    found = Progress.of(json.loads((tmp_path / "status.json").read_text()))
    assert (found.sessions, found.chunks, found.chunks_per_s, found.migrations) == ({"running": 2}, 40, 5.0, 3)


def test_a_tier_says_why_it_lacks_workers():
    state = state_after(ev.TierOffered(0.0, ev.TierSpec("a10", maximum=4)), ev.TierOffered(0.0, ev.TierSpec("b")))
    busy = ShortfallCause("queue", "all 4 machines that would do are busy", tier="a10")
    figures = figures_of(status_of(state, {}, 1.0, [busy]))
    assert [tier["reason"] for tier in figures["tiers"].values()] == ["all 4 machines that would do are busy", ""]
    assert figures["causes"] == [dataclasses.asdict(busy)]


def test_who_gets_no_work_is_told_with_the_time_that_is_left():
    class Health:
        """Names a host, a worker, and a machine where jobs fail, at once."""

        probation = 600.0

        def observe(self, view, trial):
            pass

        def doubts(self, view, worker, app):
            return False

        def judge(self, view):
            told = Verdict("n1", "CUDA error"), Verdict("n2", "it is slow", "n2w"), Verdict("n3", "exit 127", jobs=True)
            return [each for each in told if view.now < 10.0]

    tier = ev.TierOffered(0.0, ev.TierSpec("a10", maximum=9))
    hosts = {"n1w": "n1", "n2w": "n2", "n2v": "n2", "n4w": "n4", "n5w": "n5"}
    joins = [ev.WorkerJoined(0.0, ev.WorkerSpec(name, host=host, tier="a10")) for name, host in hosts.items()]
    events = [tier, *joins, ev.Tick(1.0), ev.HostDrained(2.0, "n4"), ev.Tick(60.0)]
    state = state_after(*events, health=Health())
    causes = causes_of(state, wall=1000.0)
    assert [(each.kind, each.host, each.sentence(now=1000.0)) for each in causes] == [
        ("quarantine", "n1", "host n1 gets no work, 9 min 01 s left: CUDA error"),
        ("quarantine", "n2", "worker n2w on host n2 gets no work, 9 min 01 s left: it is slow"),
        ("quarantine", "n3", "host n3 gets no new workers, 9 min 01 s left: exit 127"),
        ("drain", "n4", "host n4 is drained, until `ctxflow drain n4 --undo`"),
    ]
