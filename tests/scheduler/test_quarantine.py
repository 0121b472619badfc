"""Bad hosts, workers and GPUs in many-host runs: who is named, when, what it costs; and who never is."""

import functools
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_hosts import GPU_ERROR, ORDINARY, Host, Pool, black_hole
from scheduler_bench import Bench, only, run_of

from ctxflow.observe.history_reader import read_history
from ctxflow.observe.run_report import Report, as_text
from ctxflow.observe.transfers import Transfers
from ctxflow.policies.protocols import Verdict
from ctxflow.scheduler import Limits
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import replay
from suite.depth import for_release

ROWS = 6000
FAILURES = {"machine": GPU_ERROR, "ordinary": ORDINARY}


def goods(count=3, **options):
    return [Host(f"good{n}", **options) for n in range(count)]


def named(pool):
    """(Time, what a person was told) of each that was put in quarantine."""
    return [(time, text) for time, text in pool.notes if "gets no work" in text]


@functools.cache
def alone(size, **options):
    """The makespan with the bad host absent."""
    return Pool(goods(**options), ROWS, size).run(check=False).makespan


def sized(large, *axes, singly):
    """Cases with calls of many rows, and some with calls of one row, each of which is as dear as ten of the others."""
    cases = list(itertools.product(*axes))
    others = [case for case in cases if case not in singly]
    return [*((*case, large) for case in cases), *((*case, 1) for case in singly),
            *for_release(*((*case, 1) for case in others))]  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "since", "retries", "size"),
    sized(50, FAILURES, (0.0, 20.0), (0, 2), singly=[("machine", 0.0, 2), ("ordinary", 20.0, 0)]),
)
def test_a_black_hole_costs_no_row_and_is_named_soon(failure, since, retries, size):
    failure = FAILURES[failure]
    pool = Pool([black_hole("bad", since, failure), *goods()], ROWS, size, retries).run(check=False)
    # An ordinary error on a host that has answered all before is taken for the row's: once for each of its workers.
    few = 3 if failure is ORDINARY and since and not retries and size == 1 else 0
    assert len(pool.lost_rows) <= few
    (when, _), *more = named(pool)
    assert when <= since + 30.0
    for _, text in named(pool):
        assert "host bad gets no work for 600 s: " in text and failure.message in text
    assert pool.makespan <= 1.15 * alone(size)
    assert {worker.split("/")[0] for _, worker in pool.released} == {"bad"}
    if since and size == 50:  # It fails so fast that one of its workers has met all rows, before the others come free.
        assert len(more) <= 1
    else:
        assert not more and [hosts for _, hosts in pool.excluded] == [("bad",)]


@pytest.mark.parametrize(("failure", "since", "size"), sized(50, FAILURES, (40.0, 100.0), singly=[("ordinary", 40.0)]))
def test_a_black_hole_that_is_alone_at_first_costs_no_row(failure, since, size):
    """Who fails at once is who is free: what failed there waits for a second host, for some minutes at most."""
    failure = FAILURES[failure]
    pool = Pool([black_hole("bad", 0.0, failure), *goods(joins=since)], ROWS, size).run(check=False)
    assert not pool.lost_rows
    (when, text), *_ = named(pool)
    assert "host bad " in text and failure.message in text and when <= since + 30.0
    assert pool.makespan <= 1.15 * alone(size, joins=since)


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("failure", [GPU_ERROR, ORDINARY], ids=["machine", "ordinary"])
def test_what_fails_on_the_only_host_is_given_up_though_others_are_asked_for(failure, size, retries):
    pool = Pool([black_hole("only", 0.0, failure), Host("never", joins=1e6)], 300, size, retries)
    pool.run(until=900.0, check=False)
    assert pool.dead.keys() == set(range(300)) and not named(pool)
    assert sum(pool.runs.values()) <= 20 * 300, "it is not asked again and again"


@pytest.mark.parametrize("size", [1, 50])
def test_a_slow_host_is_named_and_what_it_runs_is_run_elsewhere(size):
    pool = Pool([Host("bad", item_seconds=1.0), *goods()], ROWS, size).run(check=False)
    [(when, text)] = named(pool)
    assert when <= 30.0 and "is slow there" in text
    assert pool.makespan <= 1.15 * alone(size) and not pool.dead


def test_an_app_that_fails_everywhere_beside_one_that_works_is_to_blame_itself():
    for failure in (GPU_ERROR, ORDINARY):
        hosts = [black_hole(f"host{n}", 0.0, failure, only="verify") for n in range(4)]
        pool = Pool(hosts, 500, 10, retries=1, other_rows=1000).run(check=False)
        assert not named(pool) and pool.dead.keys() == set(range(500))


@pytest.mark.parametrize(("failure", "size"), sized(10, FAILURES, singly=[]))
def test_a_host_that_fails_one_app_of_two_is_named(failure, size):
    pool = Pool([black_hole("bad", 0.0, FAILURES[failure], only="verify"), *goods()], ROWS, size, other_rows=ROWS)
    [(when, text)] = named(pool.run(check=False))
    assert when <= 30.0 and "host bad " in text and "calls of verify failed" in text and not pool.lost_rows


def test_many_black_holes_are_named_together():
    """They fail so fast that what one of them left to others kept all other evidence waiting."""
    bad = [black_hole(f"bad{n}", 0.0, GPU_ERROR) for n in range(6)]
    pool = Pool([*bad, *goods(30)], 3 * ROWS, 5).run(check=False)
    assert not pool.lost_rows
    for host in bad:
        assert min(time for time, text in named(pool) if f"host {host.name} " in text) <= 10.0
    assert not any("host good" in text for _, text in named(pool))
    assert max(pool.scheduler.state.charges.against.values(), default=0) == 0, "all are decided"


@pytest.mark.parametrize(("failure", "since", "size"), sized(10, FAILURES, (0.0, 20.0), singly=[("ordinary", 20.0)]))
def test_where_many_hosts_are_bad_a_second_one_is_no_witness(failure, since, size):
    """What failed on one meets others; those fail sooner than anybody has answered; and soon all rows have met one."""
    failure = FAILURES[failure]
    bad = [black_hole(f"bad{n}", since, failure) for n in range(4)]
    pool = Pool([*bad, *goods(6)], ROWS, size).run(check=False)
    # An ordinary error on a host that has answered all before is taken for the row's: once for each of its workers.
    assert len(pool.lost_rows) <= (12 if failure is ORDINARY and since else 0)
    first = {text.partition("host ")[2].split()[0]: time for time, text in reversed(named(pool))}
    if not since or size == 1:  # Else, of some, one worker has met all rows before the others come free.
        assert first.keys() == {host.name for host in bad} and max(first.values()) <= since + 30.0
    assert first.keys() <= {host.name for host in bad}


def test_siblings_of_another_model_are_not_waited_for():
    """They cannot tell whether the one that is slow is alone."""
    models = [("titan", "titan", "a10"), ("a10", "rtx", "rtx"), ("1080", "1080", "ada"), ("h100", "gtx", "a40")]
    hosts = [Host(f"host{n}", item_seconds=0.1 if n else 1.0, models=each) for n, each in enumerate(models)]
    (when, text), *_ = named(Pool(hosts, 2 * ROWS, 5).run(check=False))
    assert when <= 22.0 and text.startswith("host host0 gets no work") and "is slow there" in text


def test_a_host_that_is_a_little_slow_is_left_to_work():
    pool = Pool([Host("bad", item_seconds=0.15), *goods()], ROWS, 10).run(check=False)
    assert not named(pool) and not pool.dead


@pytest.mark.parametrize(
    "models", [("a10", "rtx", "titan"), ("k40", "p100", "v100"), ()], ids=["common", "own", "workers"]
)
@pytest.mark.parametrize("seed", [0, *for_release(1, 2, 3)])
def test_a_host_that_fails_some_of_its_calls_is_named_whatever_its_gpus(models, seed):
    """What its workers with different GPU models failed is added up, and calls with other models are compared with."""
    common = ("a10", "rtx", "titan") if models else ()
    flaky = Host("bad", fails=lambda now, number, rng: ORDINARY if rng.random() < 0.3 else None, fail_seconds=None)
    flaky.models = models
    pool = Pool([flaky, *goods(models=common)], 2 * ROWS, 10, retries=2, seed=seed).run(check=False)
    (when, text), *_ = named(pool)
    assert when <= 30.0 and text.startswith("host bad gets no work") and not pool.lost_rows
    assert {text.partition("host ")[2].split()[0] for _, text in named(pool)} == {"bad"}
    assert pool.makespan <= 1.15 * Pool(goods(models=common), 2 * ROWS, 10).run(check=False).makespan


@pytest.mark.parametrize("size", [10, 50])
def test_a_slow_host_whose_gpus_no_other_has_is_told_and_does_not_keep_the_others_waiting(size):
    """It may be slow by nature; but what it runs at the end is run elsewhere too."""
    slow = Host("slow", item_seconds=1.0, models=("k40", "p100", "v100"))
    pool = Pool([slow, *goods(models=("a10", "rtx", "titan"))], 2 * ROWS, size).run(check=False)
    assert not named(pool) and not pool.lost_rows
    told = [(time, text) for time, text in pool.notes if "keeps its work" in text]
    assert told and all("host slow" in text and "slow by nature" in text for _, text in told)
    first = 2.0 + 0.1 * size  # The first answer of the others.
    assert told[0][0] <= first + 30.0
    assert pool.makespan <= 1.15 * Pool(goods(), 2 * ROWS, size).run(check=False).makespan


@pytest.mark.parametrize("seed", [0, *for_release(*range(1, 20))])
def test_good_hosts_with_all_kinds_of_gpus_are_neither_named_nor_told(seed):
    every = [(f"m{n}", f"m{n + 1}", f"m{n // 2}") for n in range(4)]
    hosts = [Host(f"host{n}", item_seconds=0.1 * 1.3**n, models=models) for n, models in enumerate(every)]
    pool = Pool(hosts, ROWS, 10, seed=seed, bad_rows=range(0, ROWS, 50), evictions=0.3).run(check=False)
    assert not named(pool) and not [text for _, text in pool.notes if "keeps its work" in text]


def mixed_rows(seed, rows):
    """Where 2 % take a hundred times as long as the others: most of the time goes into them."""
    rng = random.Random(seed)
    return {row: 100.0 for row in range(rows) if rng.random() < 0.02}


KINDS = {
    "workers": [(), (), (), ()],
    "pairs": [("a10",) * 3, ("a10",) * 3, ("rtx",) * 3, ("rtx",) * 3],
    "own": [("a10", "rtx", "rtx"), ("1080", "1080", "ada"), ("h100", "gtx", "a40"), ("titan", "k40", "p100")],
}


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *for_release(*range(1, 20))])
def test_rows_that_take_long_are_no_hosts_fault(seed, kind, size):
    hosts = [Host(f"host{n}", models=models) for n, models in enumerate(KINDS[kind])]
    pool = Pool(hosts, 3000, size, seed=seed, longer=mixed_rows(seed, 3000)).run(check=False)
    assert not named(pool) and not [text for _, text in pool.notes if "keeps its work" in text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *for_release(*range(1, 5))])
def test_a_slow_host_is_named_or_told_though_some_rows_take_long(seed, kind):
    hosts = [Host(f"host{n}", models=each, item_seconds=0.1 if n else 1.0) for n, each in enumerate(KINDS[kind])]
    pool = Pool(hosts, 3000, 1, seed=seed, longer=mixed_rows(seed, 3000)).run(check=False)
    about = [(time, text) for time, text in pool.notes if "slow there" in text]
    assert about[0][0] <= 30.0 and all("host host0 " in text for _, text in about)


@pytest.mark.parametrize(("failure", "size"), sized(50, FAILURES, singly=[("machine",)]))
def test_what_fails_on_the_only_host_of_a_tier_waits_for_other_tiers_for_some_minutes(failure, size):
    """With a line that says so; and for as long as theirs answer it."""
    hole = functools.partial(black_hole, "bad", 0.0, FAILURES[failure], tier="gpu")
    pool = Pool([hole(), Host("good", tier="cpu")], ROWS, size).run(check=False)
    assert not pool.lost_rows and pool.makespan > 180.0
    pool = Pool([hole(), Host("busy", tier="cpu", build_seconds=3600.0)], 100, size).run(check=False)
    assert pool.dead.keys() == set(range(100)) and pool.makespan < 3600.0
    (when, text), *_ = pool.notes
    assert when <= 10.0 and text.startswith("calls of verify fail on bad, the only host of its tier so far, and wait")
    pool = Pool([hole(), black_hole("worse", 0.0, FAILURES[failure], tier="cpu")], 100, size).run(check=False)
    assert pool.makespan <= 60.0 and len(pool.dead) == 100, "where those of other tiers fail too, it is the app"


def test_one_bad_gpu_of_a_host_is_named_and_its_siblings_go_on():
    def flaky(now, number, rng):
        return GPU_ERROR if number == 0 and rng.random() < 0.2 else None

    pool = Pool([Host("bad", fails=flaky), *goods()], ROWS, 1).run(check=False)
    [(when, text)] = named(pool)
    assert text.startswith("worker bad/0/0 on host bad gets no work")
    assert not pool.lost_rows and len(pool.released) == 1 and not pool.excluded
    assert when <= 30.0


MIXED = [("a10", "rtx", "rtx"), ("1080", "1080", "ada"), ("h100", "gtx", "a40")]
"""As on the testbed, and on many a campus: hosts have hardly any GPU model in common."""


@pytest.mark.parametrize("models", [("titan", "titan", "a10"), ("titan", "k40", "p100")])
@pytest.mark.parametrize("since", [0.0, 20.0])
def test_a_host_whose_gpus_no_other_has_is_measured_by_all(since, models):
    others = [Host(f"good{n}", models=each) for n, each in enumerate(MIXED)]
    pool = Pool([black_hole("bad", since, models=models), *others], ROWS, 10).run(check=False)
    assert named(pool)[0][0] <= since + 30.0 and not pool.lost_rows
    assert {worker.split("/")[0] for _, worker in pool.released} == {"bad"}
    bad = Host("bad", builds=lambda now, rng: GPU_ERROR, models=models)
    pool = Pool([bad, *others], ROWS, 10).run(check=False)
    assert named(pool)[0][0] <= 30.0 and not pool.dead
    # An old GPU among new ones is slow by nature.
    pool = Pool([Host("old", item_seconds=0.5, models=("k40", "k40", "k40")), *others], ROWS, 10).run(check=False)
    assert not named(pool)
    pool = Pool([Host("good", models=models), *others], ROWS, 10, bad_rows=range(0, ROWS, 50), evictions=0.3)
    assert not named(pool.run(check=False))


@pytest.mark.parametrize("size", [1, 50])
def test_a_host_on_which_contexts_fail_is_given_back(size):
    bad = Host("bad", builds=lambda now, rng: GPU_ERROR)
    pool = Pool([bad, *goods(build_seconds=15.0)], ROWS, size).run(check=False)
    [(when, text)] = named(pool)
    assert when <= 30.0 and " builds of model failed" in text and "ECC" in text
    assert len(pool.released) == 3 and not pool.dead
    assert pool.makespan <= 1.15 * alone(size, build_seconds=15.0)


def test_builds_that_failed_before_others_ended_theirs_count():
    """To fail again takes another pause each time."""
    bad = Host("bad", builds=lambda now, rng: GPU_ERROR)
    pool = Pool([bad, *goods(build_seconds=30.0)], ROWS, 10).run(check=False)
    [(when, text)] = named(pool)
    assert when <= 35.0 and "builds of model failed" in text
    # What all met is nobody's fault, also before anyone has built it.
    outage = [Host(f"host{n}", builds=lambda now, rng, n=n: GPU_ERROR if now < 20.0 + n else None) for n in range(4)]
    assert not named(Pool(outage, ROWS, 10, limits=Limits(failures=100)).run(check=False))


def test_hosts_that_cannot_build_are_no_measure_of_each_other():
    """They are the first to have ended a build, and for some time the most."""
    bad = [Host(f"bad{n}", builds=lambda now, rng: GPU_ERROR) for n in range(5)]
    good = [Host(f"good{n}", build_seconds=14.0 + n / 2) for n in range(20)]
    pool = Pool([*bad, *good], 8 * ROWS, 5).run(check=False)
    assert {text.split()[1] for _, text in named(pool)} == {host.name for host in bad}
    assert max(time for time, _ in named(pool)) <= 30.0


@pytest.mark.parametrize(("failure", "size"), sized(50, FAILURES, singly=[("machine",)]))
def test_two_black_holes_of_four(failure, size):
    holes = [black_hole(f"bad{n}", 0.0, FAILURES[failure]) for n in range(2)]
    pool = Pool([*holes, *goods(2)], ROWS, size).run(check=False)
    assert not pool.lost_rows
    assert (
        {text.split()[1] for when, text in named(pool) if when <= 30.0}
        == {"bad0", "bad1"}
        == {text.split()[1] for _, text in named(pool)}
    )
    assert pool.makespan <= 1.15 * Pool(goods(2), ROWS, size).run(check=False).makespan


@pytest.mark.parametrize("seed", [0, *for_release(1, 2)])
@pytest.mark.parametrize("models", [(), ("a10", "a10", "a10")], ids=["workers", "gpus"])
def test_a_host_on_which_workers_keep_dying_is_named(models, seed):
    """Between two crashes hundreds of calls pass: those of its peers are not what crashes are compared with."""
    bad = Host("bad", lives=30.0, models=models)
    pool = Pool([bad, *goods(models=models)], 8 * ROWS, 5, seed=seed, evictions=0.02).run(check=False)
    assert named(pool) and all("host bad gets no work" in text for _, text in named(pool))
    assert named(pool)[0][0] <= 300.0 and "crashed there alone" in named(pool)[0][1] and not pool.dead


def test_a_gpu_on_which_library_processes_crash_is_named():
    crash = ev.Failure("crash", "LibraryCrashed", "the process was killed by signal 11")
    bad = Host("bad", fails=lambda now, number, rng: crash if not number and rng.random() < 0.03 else None)
    (_, text), *_ = named(Pool([bad, *goods()], 5 * ROWS, 5).run(check=False))
    assert text.startswith("worker bad/0/0 on host bad gets no work") and "signal 11" in text


@pytest.mark.parametrize("seed", [0, *for_release(*range(1, 5))])
def test_crashes_that_all_hosts_have_alike_or_at_once_incriminate_nobody(seed):
    pool = Pool(goods(4, lives=90.0), 4 * ROWS, 5, seed=seed).run(check=False)
    assert not named(pool)
    pool = Pool([*goods(3, workers=3), Host("big", 12)], 4 * ROWS, 5, seed=seed)
    for when in (20.0, 60.0):  # It goes down with all its workers, twice.
        pool.at(when, lambda: [pool.crash(name) for name in list(pool.workers) if name.startswith("big")])
    assert not named(pool.run(check=False))


@pytest.mark.parametrize("seed", [*range(4), *for_release(*range(4, 20))])
def test_poison_rows_and_evictions_incriminate_nobody(seed):
    rng = random.Random(seed)
    poison = set()
    while len(poison) < ROWS * 0.02:
        first = rng.randrange(ROWS)
        poison |= set(range(first, min(ROWS, first + rng.randrange(1, 60))))
    pool = Pool(goods(4), ROWS, rng.choice([1, 10, 50]), rng.choice([0, 2]), seed, poison, evictions=0.3)
    pool.run(check=False)
    assert not named(pool) and not pool.lost_rows and pool.dead.keys() == poison


@pytest.mark.parametrize(("failure", "size"), sized(50, FAILURES, singly=[]))
def test_an_outage_that_hits_all_incriminates_nobody(failure, size):
    hosts = [
        Host(f"h{n}", fails=lambda now, number, rng: FAILURES[failure] if 20 <= now < 30 else None) for n in range(4)
    ]  # fmt: skip
    pool = Pool(hosts, ROWS, size, retries=2).run(check=False)
    assert not named(pool) and pool.makespan


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize("failure", [GPU_ERROR, ORDINARY], ids=["machine", "ordinary"])
def test_where_all_fail_alike_it_is_nobody(failure, hosts):
    pool = Pool([black_hole(f"h{n}", 0.0, failure) for n in range(hosts)], 1000, 1).run()
    assert not named(pool) and len(pool.dead) == 1000
    assert sum(pool.runs.values()) <= 2.5 * 1000, "second opinions end where all say the same"


def test_a_host_that_joins_in_the_midst_of_poison_is_not_to_blame():
    poison = set(range(2000, 2400))
    pool = Pool([*goods(3), Host("late", joins=20.0)], ROWS, 1, bad_rows=poison).run(check=False)
    assert not named(pool) and pool.dead.keys() == poison and pool.runs["late"]


def test_a_worker_that_comes_back_from_quarantine_is_given_back_and_tried_again_later():
    class Returning(Pool):
        def go(self, name):
            host, number = self.workers[name]
            super().go(name)
            self.at(self.now + 1.0, self.join, host, number)

    hole = black_hole("bad", workers=1)
    hole.fails = lambda now, number, rng: GPU_ERROR if now < 60 else None
    pool = Returning([hole, *goods(2)], 20_000, 10, health={"policy": "sequential", "probation": 60.0}).run(check=False)
    [(when, _)] = named(pool)
    assert [text for _, text in pool.notes if "tried again" in text] == ["host bad is tried again"]
    assert 1 < len(pool.released) <= 5, "given back at once, and then held without work"
    assert pool.excluded[-1][1] == () and pool.excluded[-1][0] >= when + 60.0
    assert pool.runs["bad"] > 1000 and not pool.dead, "it is well again"


def test_what_is_still_bad_after_its_time_is_named_sooner_and_for_longer():
    pool = Pool([black_hole("bad"), *goods()], 40_000, 10, health={"policy": "sequential", "probation": 30.0})
    pool.at(60.0, pool.join, pool.hosts["bad"], 0)
    pool.run(until=120.0, check=False)
    first, again = named(pool)
    assert "for 30 s" in first[1] and "for 60 s, not for the first time" in again[1]


def test_a_run_with_bad_hosts_is_replayed_and_reported():
    def flaky(now, number, rng):
        return GPU_ERROR if number == 0 else None

    pool = Pool([black_hole("hole"), Host("flaky", fails=flaky), *goods()], 3000, 10, retries=1, bad_rows={5}).run()
    assert replay(pool.log) == len(pool.log) - 1
    history = read_history(pool.log)
    assert {each["host"] for _, each in history.quarantines} == {"hole", "flaky"}
    text = as_text(Report(Path("r"), history, Transfers(), []))
    assert "Quarantine" in text and "ECC" in text
    for when, told in named(pool):
        [(since, each)] = [pair for pair in history.quarantines if pair[0] == when and pair[1]["host"] in told]
        assert each["cause"] in told and each["until"] == since + 600.0


def test_the_report_says_who_was_slow_and_kept_its_work():
    slow = Host("slow", item_seconds=1.0, models=("k40", "p100", "v100"))
    pool = Pool([slow, *goods(models=("a10", "rtx", "titan"))], 3000, 10).run()
    history = read_history(pool.log)
    assert [each["host"] for _, each in history.quarantines] == ["slow"] and not named(pool)
    [told] = [line for line in as_text(Report(Path("r"), history, Transfers(), [])).splitlines() if "kept its" in line]
    assert told.split()[0] == "slow" and told.endswith("kept its work")
    assert history.by_host["slow"].quarantines == 0


class Named:
    """A health policy that names whom it is told to."""

    def __init__(self, probation=600.0):
        self.probation, self.verdicts = probation, []

    def observe(self, view, trial):
        pass

    def doubts(self, view, worker, app):
        return False

    def judge(self, view):
        verdicts, self.verdicts = self.verdicts, []
        return verdicts


class Quarantined(Bench):
    """Workers, one a host unless it is said otherwise, that somebody names."""

    def __init__(self, probation=600.0, **options):
        self.health = Named(probation)
        super().__init__(health=self.health, **options)

    def tick(self, *hosts, worker="", **more):
        """A second later; these hosts, or this worker of one, are named."""
        self.now += 1.0
        self.health.verdicts += [Verdict(host, "it fails", worker, **more) for host in hosts]
        return self.tell(ev.Tick)

    @property
    def held(self):
        return {worker.host for worker in self.state.wards.held.values()}


def two_by_hand():
    """Two hosts that have built a model, and have nothing to do."""
    bench = Quarantined()
    bench.app("verify", "model")
    bench.submit("verify", 8)
    runs = []
    for host in "AB":
        [load] = only(bench.join(f"w{host}", host=host, acquired=False), cmd.Load)
        runs += only(bench.ready(load.worker, "model"), cmd.Run)
    return bench, runs


def test_none_is_named_while_nobody_else_stays():
    bench, _ = two_by_hand()
    bench.tick("A")
    assert bench.held == {"A"}
    while bench.state.attempts:
        for attempt in list(bench.state.attempts.values()):
            bench.finish(cmd.Run(attempt.worker, attempt.id, attempt.app, attempt.context, attempt.items))
    bench.tick("B")
    assert bench.held == {"A"}, "though nothing waits or runs"
    assert run_of(bench.submit("verify", 4)).worker == "wB"


@pytest.mark.parametrize("how", ["evicted", "lost", "noticed", "drained"])
@pytest.mark.parametrize("new", [False, True], ids=["old work", "new work"])
def test_where_the_others_go_the_last_host_works_at_once(how, new):
    bench, _ = two_by_hand()
    bench.tick("A")
    if how == "noticed":
        bench.tell(ev.EvictionNotice, "wB")
    elif how == "drained":
        bench.tell(ev.HostDrained, "B")
    else:
        bench.lose("wB", evicted=how == "evicted")
    commands = bench.submit("verify", 4) if new or how in ("noticed", "drained") else bench.tick()
    assert bench.held == ({"B"} if how == "drained" else set())
    assert "host A is tried again: no other host can do what waits" in [note.text for note in only(commands, cmd.Note)]
    assert only(commands, cmd.Load) == [cmd.Load("wA", "model")]


def test_what_is_submitted_while_all_are_held_is_begun_by_whose_time_is_over_first():
    bench, _ = two_by_hand()
    bench.join("wC", host="C", acquired=False)
    bench.ready("wC", "model")
    bench.tick("A")
    bench.tick("B")
    assert bench.held == {"A", "B"}
    bench.lose("wC", evicted=True)
    assert only(bench.submit("verify", 4), cmd.Load) == [cmd.Load("wA", "model")] and bench.held == {"B"}


def offer(bench, workers, items):
    """Offer a tier of so many workers, and submit items."""
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, workers))
    bench.app("verify", "model")
    bench.submit("verify", items)


def test_no_job_is_asked_for_where_jobs_end_before_their_workers_join():
    bench = Bench()
    offer(bench, 12, 100)
    for host in "ABCD":
        bench.join(*(f"{host}{n}" for n in range(3 - (host == "D"))), host=host, machine=f"{host}.site", tier="default")
    for job in range(3):
        bench.tell(ev.JobFailed, "default", f"{job}.0", "D.site", "it ended with status 127")
    told = []
    for _ in range(5):
        bench.now += 1.0
        told += bench.tell(ev.Tick)
    [quarantine] = only(told, cmd.Quarantine)
    assert only(told, cmd.Exclude) == [cmd.Exclude("default", ("D.site",))]
    [note] = only(told, cmd.Note)
    assert note.text.startswith("host D.site gets no new workers for 600 s: 3 of 3 jobs ended there")
    assert "status 127" in note.text and not only(told, cmd.Release), "those who are there work on"
    assert only(bench.join("D9", host="D", machine="D.site", tier="default"), cmd.Load), "and so does who comes"
    bench.now = quarantine.until
    assert only(bench.tell(ev.Tick), cmd.Exclude) == [cmd.Exclude("default", ())]


@pytest.mark.parametrize("recovers", [False, True])
def test_jobs_that_end_on_all_hosts_at_once_are_no_hosts_fault(recovers):
    """As where a file system is away for a minute; hosts that are not full try again and again."""
    bench = Bench()
    offer(bench, 40, 1000)
    hosts = [f"h{n}" for n in range(12)]
    for host in hosts:
        bench.join(f"{host}/0", f"{host}/1", host=host, tier="default")
    bench.now += 7200.0
    told = []
    for second in range(60):
        bench.now += 1.0
        if second % 5 < 2:
            for host in hosts[:6]:
                bench.tell(ev.JobFailed, "default", f"{second}.{host}", host, "it ended with status 127")
        told += bench.tell(ev.Tick)
    if recovers:
        for host in hosts[:6]:
            told += bench.join(f"{host}/2", host=host, tier="default")
        told += bench.tell(ev.Tick)
    assert not only(told, cmd.Exclude) and not only(told, cmd.Quarantine)


def test_two_hosts_on_which_jobs_end_while_workers_join_elsewhere_are_named_for_that_tier_alone():
    bench = Bench()
    for tier in ("default", "other"):
        bench.tell(ev.TierOffered, ev.TierSpec(tier, 0, 12))
    bench.app("verify", "model")
    bench.submit("verify", 1000)
    told = []
    for second in range(20):
        bench.now += 1.0
        if second < 6:
            told += bench.join(f"good{second}/0", host=f"good{second}", tier="default")
            for host in ("bad0", "bad1"):
                told += bench.tell(ev.JobFailed, "default", f"{second}.{host}", host, "it ended with status 127")
        told += bench.tell(ev.Tick)
    assert only(told, cmd.Exclude)[-1] == cmd.Exclude("default", ("bad0", "bad1"))
    assert {each.tier for each in only(told, cmd.Exclude)} == {"default"}


def test_a_worker_in_quarantine_stays_there_where_its_hosts_jobs_are_named():
    bench = Quarantined()
    offer(bench, 12, 100)
    for host in "ABCD":
        bench.join(*(f"{host}{n}" for n in range(2)), host=host, tier="default")
    bench.tick("A", worker="A0")
    bench.tick("A", jobs=True, tier="default")
    assert [(unit.worker, unit.jobs) for unit in bench.state.wards.units] == [("A0", False), ("", True)]
    bench.scheduler.validate()


@pytest.mark.parametrize("worker", ["", "A0"])
def test_a_slow_host_that_is_gone_is_told_no_longer(worker):
    bench = Quarantined()
    bench.join("A0", host="A")
    bench.join("B0", host="B")
    bench.tick("A", worker=worker, told=True)
    bench.tick()
    assert [unit.host for unit in bench.state.wards.slow] == ["A"]
    bench.lose("A0", evicted=True)
    bench.tick()
    assert not bench.state.wards.slow


def test_who_is_drained_by_hand_is_never_tried_again_before_that_person_says_so():
    bench, _ = two_by_hand()
    bench.tell(ev.HostDrained, "A")
    bench.lose("wB", evicted=True)
    for _ in range(200):
        bench.tick()
    assert bench.held <= {"A"} and not any(unit.host != "A" for unit in bench.state.wards.units)


def test_a_host_is_asked_for_again_where_nobody_is_there_for_a_minute():
    bench = Quarantined()
    offer(bench, 2, 8)
    for host in "AB":
        bench.join(f"w{host}", host=host, tier="default")
    excluded = only(bench.tick("A"), cmd.Exclude)
    assert excluded == [cmd.Exclude("default", ("A",))]
    bench.lose("wA", evicted=True)
    bench.lose("wB", evicted=True)
    commands = [command for _ in range(70) for command in bench.tick()]
    assert only(commands, cmd.Exclude) == [cmd.Exclude("default", ())]


@pytest.mark.parametrize("jobs", [False, True])
def test_a_host_is_asked_for_again_where_those_who_are_left_cannot_do_what_waits(jobs):
    """A worker without a GPU is nobody's stand-in; a host without GPUs stays where it is."""
    bench = Quarantined()
    bench.tell(ev.TierOffered, ev.TierSpec("cpu", 0, 4))
    bench.tell(ev.TierOffered, ev.TierSpec("gpu", 0, 2, gpus=1))
    bench.context("wide", gpus=1)
    bench.app("verify", "wide")
    bench.submit("verify", 400)
    bench.join("wC", host="C", tier="cpu")
    bench.join("wD", host="D", tier="cpu")
    for host in "AB":
        bench.join(f"w{host}", host=host, tier="gpu", gpus=1)
        bench.ready(f"w{host}", "wide")
    bench.tick("D")
    if jobs:
        bench.tick("F", jobs=True, tier="gpu")
    else:
        bench.tick("A")
    for host in "AB":
        bench.lose(f"w{host}", evicted=True)
    told = [bench.tick() for _ in range(62)]
    assert not any(only(commands, cmd.Exclude) for commands in told[:59])
    [last] = [commands for commands in told if only(commands, cmd.Exclude)]
    host = "F" if jobs else "A"
    assert f"host {host} is tried again: nobody else can do what waits" in [note.text for note in only(last, cmd.Note)]
    assert {each.hosts for each in only(last, cmd.Exclude) if each.tier == "gpu"} == {("D",)}


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["join", "join", "join", "lose", "notice", "name", "name worker", "drain", "use", "build",
                             "fail build", "end", "fail", "submit", "tick", "tick"]),
            st.integers(0, 3),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_nothing_waits_for_those_who_are_only_in_quarantine(acts):
    """One of them works on within a tick, whatever has happened, where nobody else could."""
    bench = Quarantined(probation=1000.0)
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 8))
    needs = {"narrow": 0, "wide": 2}
    for name, gpus in needs.items():
        bench.context(name, gpus=gpus)
        bench.app(name, name)

    def check():
        bench.tick()
        state = bench.state
        for app in state.ready.values():
            suits = [w for w in state.workers.values() if w.gpus >= needs[app.context]]
            by_hand = {unit.host for unit in state.wards.units if unit.by_hand}
            held = [w for w in suits if w.id in state.wards.held and not w.released and w.noticed is None]
            held = [w for w in held if w.host not in by_hand]
            others = [w for w in suits if not w.leaving]
            suspects = state.contexts[app.context].suspects
            assert not held or others, f"{app.id} waits for {held[0].id}, which is held"
            fresh = [w for w in held if w.id not in suspects]
            assert not fresh or any(w.id not in suspects for w in others), f"{app.id} waits for {fresh[0].id}"

    def pick(rows, number):
        return list(rows)[number % len(rows)] if rows else None

    for count, (act, host, number) in enumerate(acts):
        worker, name = pick(bench.state.workers, number), f"h{host}"
        attempt = pick(bench.state.attempts.values(), number)
        if act == "join":
            bench.join(f"w{count}", host=name, gpus=number % 3, tier="default", acquired=number % 2 == 0)
        elif act == "submit":
            bench.submit(["narrow", "wide"][number % 2], 1 + host)
        elif act in ("name", "name worker"):
            there = [w.id for w in bench.state.workers.values() if w.host == name]
            if there:
                bench.tick(name, worker=there[number % len(there)] if act == "name worker" else "")
        elif act in ("drain", "use"):
            bench.tell(ev.HostDrained, name, act == "drain")
        elif act == "tick":
            check()
        elif act in ("end", "fail") and attempt is not None:
            run = cmd.Run(attempt.worker, attempt.id, attempt.app, attempt.context, attempt.items)
            bench.finish(run) if act == "end" else bench.fail(run)
        elif act in ("build", "fail build") and worker is not None:
            for held in list(bench.state.workers[worker].contexts.values()):
                if held.building and held.context in bench.state.workers[worker].contexts:
                    (bench.ready if act == "build" else bench.fail_context)(worker, held.context)
        elif act == "lose" and worker is not None:
            bench.lose(worker, evicted=number % 2 == 0)
        elif act == "notice" and worker is not None:
            bench.tell(ev.EvictionNotice, worker)
    check()


def test_without_the_policy_nobody_is_named():
    pool = Pool([black_hole("bad"), *goods()], 500, 10, health="none").run()
    assert not named(pool) and not pool.lost_rows


@given(
    seed=st.integers(0, 999),
    bad=st.integers(0, 2),
    workers=st.integers(1, 3),
    size=st.sampled_from([1, 7, 50]),
    poison=st.sets(st.integers(0, 399), max_size=20),
    evictions=st.sampled_from([0.0, 0.3]),
    failure=st.sampled_from([GPU_ERROR, ORDINARY]),
    share=st.sampled_from([0.2, 1.0]),
)
def test_whatever_happens_the_invariants_hold(seed, bad, workers, size, poison, evictions, failure, share):
    """No row is lost or doubled, groups and charges are what they are said to be: `validate` after every few events."""
    holes = [
        Host(f"bad{n}", workers, fails=lambda now, number, rng: failure if rng.random() < share else None)
        for n in range(bad)
    ]
    pool = Pool([*holes, *goods(3, workers=workers)], 400, size, 1, seed, poison, evictions).run()
    assert pool.dead.keys() >= poison and pool.makespan
