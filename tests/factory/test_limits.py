"""What workers use is counted, limits of it are told once, and the record over runs is its user's alone."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import CtxflowError
from ctxflow.factory.exchange import FactoryClient, RunFiles
from ctxflow.factory.limits import (
    FactoryLimits,
    SpendingMeter,
    SpendingRecord,
    Spent,
    grants,
    limits_of,
    reached,
    shares,
    spending_file,
    standing,
    to_reclaim,
)
from ctxflow.factory.provider import JobChange
from ctxflow.sites import Site, load_site
from ctxflow.sites.site_model import Tier
from ctxflow.sites.site_problems import SiteError

TIER = Tier(name="a10", provider="local", gpus=2, price=3.0)
HOUR = 3600.0


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_job_counts_from_its_start_to_its_end_each_time():
    meter = SpendingMeter(gpus=2, price=3.0)
    meter.submitted(["1", "2"], 2)
    meter.submitted(["8"], 8)  # On GPUs of one's choice.
    for job in ("1", "8"):
        meter.changed(JobChange(job, "running"), now=0.0)
    assert meter.spent(now=HOUR) == Spent(10.0, 6.0)
    meter.changed(JobChange("1", "evicted"), now=HOUR)
    meter.changed(JobChange("8", "ended"), now=HOUR)
    assert meter.spent(now=5 * HOUR) == Spent(10.0, 6.0)  # Those that wait cost nothing.
    meter.changed(JobChange("1", "running"), now=5 * HOUR)
    meter.changed(JobChange("1", "ended"), now=6 * HOUR)
    meter.changed(JobChange("1", "ended"), now=9 * HOUR)
    assert meter.spent(now=9 * HOUR) == Spent(12.0, 9.0)


def test_a_job_that_the_batch_system_lost_sight_of_counts_all_the_while():
    meter = SpendingMeter(gpus=1)
    for hour, state in enumerate(["running", "evicted", "running", "ended"]):
        meter.changed(JobChange("1", state, resumed=hour == 2), now=hour * HOUR)
    assert meter.spent(now=9 * HOUR) == Spent(3.0, 0.0)


def test_a_worker_without_gpus_counts_as_one_with_one():
    meter = SpendingMeter(gpus=0)
    meter.changed(JobChange("1", "running"), now=0.0)
    assert meter.spent(now=HOUR) == Spent(1.0, 0.0)


def test_a_limit_is_reached_with_its_figures():
    site = Site(gpu_hours_per_run=10, cost_per_run=5)
    assert reached(standing("run", Spent(9.99, 4.99), limits_of(site, "run"))) == ""
    told = reached(standing("run", Spent(9.99, 5.0), limits_of(site, "run")))
    assert "cost_per_run = 5" in told and "cost 5" in told
    assert limits_of(site, "user") == {}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"gpu_hours_per_run": 3}, "the embedded engine"),
        ({"engine": "taskvine", "tiers": [TIER], "gpu_hours_per_user": 3}, 'write acquire = "factory"'),
        ({"engine": "taskvine", "tiers": [Tier()], "cost_per_run": 3}, "the price of a worker's hour"),
    ],
)
def test_limits_that_nobody_would_count_are_refused(keys, sentence):
    with pytest.raises(SiteError, match=sentence):
        load_site(Site(**keys))


def test_the_record_goes_over_factories_and_machines_and_is_its_users_alone(home):
    first = SpendingRecord("lab")
    first.write(Spent(1.0, 2.0))
    first.write(Spent(3.0, 4.0))
    path = spending_file("lab")
    assert os.stat(path).st_mode & 0o777 == 0o600
    SpendingRecord("other").write(Spent(100.0, 100.0))
    with open(spending_file("lab", "elsewhere"), "w") as file:
        json.dump({"gpu_hours": 0.5, "cost": 0.5}, file)
    os.chmod(spending_file("lab", "elsewhere"), 0o600)
    assert SpendingRecord("lab").total(Spent(1.0, 1.0)) == Spent(4.5, 5.5)
    assert socket.gethostname() in path
    os.chmod(path, 0o666)
    with pytest.raises(CtxflowError, match="others may write"):
        SpendingRecord("lab")


def test_a_factory_tells_of_a_limit_once_and_of_more_room():
    said = []
    site = Site(engine="taskvine", tiers=(TIER,), acquire="factory", gpu_hours_per_factory=2, gpu_hours_per_user=3)
    limits = FactoryLimits("lab", said.append)
    limits.look(site, Spent(1.0))
    assert (limits.reached, said) == ("", [])
    for _ in range(3):
        limits.look(site, Spent(2.5))
    assert len(said) == 1 and "gpu_hours_per_factory = 2" in said[0] and "2.5 GPU-hours" in said[0]
    more = site.model_copy(update={"gpu_hours_per_factory": 9.0})
    limits.look(more, Spent(2.5), last=True)
    assert limits.reached == "" and "again" in said[1]
    # The next factory of this user has only what is left.
    limits = FactoryLimits("lab", said.append)
    limits.look(more, Spent(0.6))
    assert "gpu_hours_per_user = 3" in limits.reached and "3.1 GPU-hours" in said[-1]


def test_a_run_of_a_factory_counts_its_own_and_hears_of_the_rest():
    client = FactoryClient("one", "lab", lambda: None, [TIER])
    client.start()
    try:
        files = RunFiles("one")
        files.tell("a10", JobChange("1.0", "running"))
        files.bound("a10", 3)
        files.tell_limits(standing("user", Spent(1.0), {"gpu_hours": 2.0}))
        for _ in range(400):
            if client.limits_beyond():
                break
            client._thread.join(0.05)
        assert client.maxima() == {"a10": 3}
        assert client.limits_beyond()[0]["used"] == 1.0
        assert client.spent().gpu_hours > 0 and client.spent().cost > 0
    finally:
        client.stop()


RUNS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30))
MAXIMUM = st.integers(0, 60)


@given(RUNS, MAXIMUM)
def test_shares_are_fair(wants, maximum):
    got = shares(wants, maximum)
    assert got.keys() == wants.keys()
    assert all(0 <= got[run] <= wants[run] for run in wants)
    assert sum(got.values()) == min(maximum, sum(wants.values()))  # Never above; leftovers are given out.
    for run, want in wants.items():
        if got[run] < want:  # It lacks some: nobody has more than it, but for one that cannot be halved.
            assert max(got.values()) <= got[run] + 1


@given(RUNS, RUNS, MAXIMUM)
def test_what_is_granted_never_adds_up_to_more_than_the_maximum(wants, held, maximum):
    allowed = grants(wants, held, maximum)
    most = sum(max(held.get(run, 0), allowed.get(run, 0)) for run in {*held, *wants})
    assert most <= max(maximum, sum(held.values()))
    share = shares(wants, maximum)
    assert all(allowed[run] <= share[run] for run in wants)


@given(RUNS, RUNS, MAXIMUM, st.data())
def test_shares_are_reached_step_by_step(wants, held, maximum, data):
    """Pending jobs are taken back, running ones where `to_reclaim` says so: in the end each has its share."""
    held = {run: held.get(run, 0) for run in wants}
    running = {run: data.draw(st.integers(0, count)) for run, count in held.items()}
    for run, want in wants.items():  # What a run does not want, it releases by itself.
        running[run] = min(running[run], want)
        held[run] = min(held[run], want)
    share = shares(wants, maximum)
    for _ in range(20):
        allowed = grants(wants, held, maximum)
        give = to_reclaim(wants, held, running, maximum)
        for run in wants:
            assert 0 <= give[run] <= running[run]
            assert running[run] - give[run] >= min(running[run], share[run])  # Nobody falls below its share.
            running[run] -= give[run]
            held[run] = max(running[run], min(held[run] - give[run], allowed[run]))  # Those that wait go.
        total = sum(held.values())
        for run, count in allowed.items():
            more = max(0, min(count - held[run], maximum - total))
            held[run], running[run], total = held[run] + more, running[run] + more, total + more
    assert all(held[run] >= share[run] for run in wants)


@pytest.mark.parametrize("maximum", [0, 3, 8])
def test_a_lowered_maximum_costs_no_worker(maximum):
    assert to_reclaim({"a": 8}, {"a": 8}, {"a": 8}, maximum) == {"a": 0}


def test_a_run_without_jobs_gives_none_to_those_that_lack_some():
    assert to_reclaim({"a": 1, "b": 1}, {}, {}, 1) == {"a": 0, "b": 0}


def test_a_record_tells_for_how_long_nobody_has_counted(home):
    site = Site(engine="taskvine", tiers=(TIER,), acquire="factory", gpu_hours_per_user=3)
    limits = FactoryLimits("lab", print)
    assert limits.behind() == 0.0
    limits.look(site, Spent(1.0))
    assert limits.behind() == 0.0, "there was no factory before"
    path = spending_file("lab")
    os.utime(path, times=(time.time() - HOUR,) * 2)  # It was killed an hour ago.
    again = FactoryLimits("lab", print)
    again.look(site, Spent())
    assert HOUR <= again.behind() < 2 * HOUR
    assert FactoryLimits("other", print).behind() == 0.0


def test_a_factory_that_had_nothing_to_count_was_there_all_the_same(home):
    site = Site(engine="taskvine", tiers=(TIER,), acquire="factory", gpu_hours_per_user=3)
    FactoryLimits("lab", print).look(site, Spent())
    os.utime(spending_file("lab"), times=(time.time() - 100 * HOUR,) * 2)
    FactoryLimits("lab", print).look(site, Spent())  # Which is killed in its turn.
    last = FactoryLimits("lab", print)
    last.look(site, Spent())
    assert last.behind() < HOUR
