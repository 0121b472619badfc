"""The health policies by themselves: options, doubts, what is evidence against whom."""

import dataclasses
import re
from pathlib import Path

import pytest

from ctxflow.policies.health import SequentialTest
from ctxflow.policies.protocols import Trial
from ctxflow.policies.registry import make
from ctxflow.policies.simple import NoQuarantine

DOCS = Path(__file__).parents[2] / "docs"


@dataclasses.dataclass
class Machine:
    """What a policy sees of a worker."""

    id: str
    host: str
    devices: tuple = ()
    tier: str = "gpus"
    gpu_model: str = "A10"
    running: dict = dataclasses.field(default_factory=dict)
    contexts: dict = dataclasses.field(default_factory=dict)
    noticed: float | None = None
    draining: bool = False
    joined: float = 0.0

    @property
    def machine(self):
        return f"{self.host}.site"


@dataclasses.dataclass
class Tier:
    """What a policy sees of a tier."""

    name: str
    requested: int | None = None
    connected: int = 0


@dataclasses.dataclass
class App:
    id: str = "a"


class View:
    """Workers on hosts, and a clock."""

    def __init__(self, hosts=4, each=2):
        names = [(f"h{n}", f"h{n}/{k}") for n in range(hosts) for k in range(each)]
        self.workers = {name: Machine(name, host, (f"GPU-{name}",)) for host, name in names}
        self.apps, self.attempts, self.now = {"a": App()}, {}, 0.0
        self.tiers = {"gpus": Tier("gpus", len(names), len(names))}

    def hosts(self, tier, gpu_model="*"):
        there = [worker for worker in self.workers.values() if worker.tier == tier]
        return len({worker.host for worker in there if gpu_model in ("*", worker.gpu_model)})

    def permits(self, app, tier):
        return True

    def holding(self, context):
        return [worker for worker in self.workers.values() if context in worker.contexts]


class Bench:
    def __init__(self, policy=None, **options):
        self.policy, self.view, self.attempt = policy or SequentialTest(), View(**options), 0

    def answered(self, *names, times=1):
        for name in names:
            for _ in range(times):
                self.policy.observe(self.view, Trial(self.view.workers[name], "call", "a", "app", True))

    def missed(self, name):
        self.attempt += 1
        self.policy.observe(self.view, Trial(self.view.workers[name], "miss", "a", "app", False, self.attempt))
        return self.attempt

    def failed(self, name, times=1):
        for _ in range(times):
            number = self.missed(name)
            trial = Trial(self.view.workers[name], "call", "a", "app", False, number, None, "ECC")
            self.policy.observe(self.view, trial)

    def jobs(self, machine, *outcomes, message="it ended with status 127"):
        for passed in outcomes:
            self.policy.tried_job(self.view, "gpus", machine, passed, "" if passed else message)

    def judge(self, seconds=3.0):
        """What is said until some seconds from now."""
        found, end = [], self.view.now + seconds
        while self.view.now < end:
            self.view.now += 0.5
            found += self.policy.judge(self.view)
        return found

    def doubts(self, name):
        return self.policy.doubts(self.view, self.view.workers[name], self.view.apps["a"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"false_alarm": 0.0}, "between 0 and 1"),
        ({"false_alarm": 2.0}, "between 0 and 1"),
        ({"slow": 1.0}, "more than 1"),
        ({"probation": -1.0}, "0 or more"),
    ],
)
def test_options_that_make_no_sense(options, error):
    with pytest.raises(ValueError, match=error):
        make("health", {"policy": "sequential", **options})


def test_evidence_is_waited_with_and_compared_again():
    bench = Bench()
    bench.answered(*bench.view.workers, times=50)
    bench.failed("h0/0", 8)
    assert bench.judge(1.5) == []
    [verdict] = bench.judge(12.0)
    assert (verdict.host, verdict.worker) == ("h0", "h0/0") and "ECC" in verdict.cause
    assert bench.judge(30.0) == [], "once"


def test_a_failure_that_many_answers_have_made_up_for_leaves_nothing_behind():
    bench = Bench()
    bench.answered(*bench.view.workers, times=50)
    bench.failed("h0/0")
    bench.answered("h0/0", times=200)
    bench.failed("h0/0", 8)
    [verdict] = bench.judge(20.0)
    assert verdict.host == "h0" and "8 of 8 calls of app failed" in verdict.cause


def test_a_second_worker_of_a_host_makes_it_the_host():
    bench = Bench(each=4)
    bench.answered(*bench.view.workers, times=50)
    bench.failed("h0/0", 8)
    assert [verdict.worker for verdict in bench.judge(20.0)] == ["h0/0"]
    bench.failed("h0/1", 9)
    [verdict] = bench.judge(20.0)
    assert (verdict.host, verdict.worker) == ("h0", "")


def test_what_all_fail_is_no_evidence():
    bench = Bench()
    for _ in range(10):
        for name in bench.view.workers:
            bench.answered(name, times=2)
            bench.failed(name)
    assert bench.judge(30.0) == []


def test_without_peers_there_is_no_evidence():
    bench = Bench(hosts=1, each=1)
    bench.failed("h0/0", 100)
    assert bench.judge(30.0) == [] and not Bench(hosts=1, each=1).doubts("h0/0")


def test_alone_a_host_is_in_doubt_while_others_are_awaited_but_not_for_ever():
    bench = Bench(hosts=1, each=2)
    bench.view.tiers["gpus"].requested = 8
    assert not bench.doubts("h0/0")
    bench.missed("h0/0")
    assert bench.doubts("h0/0") and not bench.doubts("h0/1")
    bench.view.now += 170.0
    bench.missed("h0/1")
    assert bench.doubts("h0/0") and bench.doubts("h0/1")
    bench.view.now += 20.0
    bench.missed("h0/1")
    assert not bench.doubts("h0/0") and not bench.doubts("h0/1"), "nobody came"
    bench.answered("h0/0")
    bench.missed("h0/0")
    assert not bench.doubts("h0/0"), "it has answered something"


def test_alone_in_its_tier_a_host_is_in_doubt_while_those_of_others_answer_or_may_soon():
    bench = Bench(hosts=1, each=1)
    bench.view.tiers["cpus"] = Tier("cpus")
    bench.missed("h0/0")
    assert not bench.doubts("h0/0")
    bench.view.workers["other"] = Machine("other", "h9", tier="cpus", gpu_model=None)
    assert bench.doubts("h0/0"), "it may answer"
    bench.view.now += 190.0
    bench.missed("h0/0")
    assert not bench.doubts("h0/0"), "it did not try"
    bench.answered("other")
    bench.view.now += 100.0
    bench.missed("h0/0")
    assert bench.doubts("h0/0"), "it answers"
    bench.view.now += 1000.0
    bench.missed("other")
    bench.missed("h0/0")
    assert not bench.doubts("h0/0") and not bench.doubts("other"), "it fails as well"


def test_alone_it_is_not_in_doubt_for_ever_either_where_it_answered_before():
    bench = Bench(hosts=1, each=1)
    bench.view.tiers["gpus"].requested = 8
    bench.answered("h0/0")
    for _ in range(20):
        bench.missed("h0/0")
    assert bench.doubts("h0/0")
    bench.view.now += 190.0
    bench.missed("h0/0")
    assert not bench.doubts("h0/0"), "nobody came"


def test_a_machine_on_which_jobs_end_before_their_workers_join_is_named():
    bench = Bench(hosts=3, each=3)
    bench.jobs("h9.site", False, False, False)
    [verdict] = bench.judge(5.0)
    assert (verdict.host, verdict.worker, verdict.jobs) == ("h9.site", "", True)
    assert "3 of 3 jobs ended there before a worker joined, and 0 of 6 elsewhere: it ended" in verdict.cause
    assert bench.judge(5.0) == [], "once"


def test_where_jobs_end_before_their_workers_join_everywhere_it_is_no_machine():
    bench = Bench(hosts=1, each=0)
    for _ in range(5):
        for machine in ("h1.site", "h2.site", "h3.site"):
            bench.jobs(machine, False, False)
        assert bench.judge(5.0) == []
    bench = Bench(hosts=1, each=1)
    bench.jobs("h0.site", *[False] * 20)
    assert bench.judge(5.0) == [], "there is no other"


def test_jobs_that_end_now_and_then_are_no_evidence():
    bench = Bench(hosts=3, each=3)
    for _ in range(10):
        for machine in ("h0.site", "h1.site", "h2.site", "h9.site"):
            bench.jobs(machine, False, *[True] * 5)
        assert bench.judge(5.0) == []


def test_jobs_that_failed_before_others_workers_joined_count():
    bench = Bench(hosts=1, each=0)
    bench.jobs("h9.site", False, False, False)
    assert bench.judge(20.0) == []
    for machine in ("h1.site", "h2.site"):
        bench.jobs(machine, True, True, True)
    [verdict] = bench.judge(5.0)
    assert verdict.host == "h9.site"


def test_three_failed_builds_while_peers_build_are_enough():
    bench = Bench(hosts=4, each=3)
    for worker in bench.view.workers.values():
        trial = Trial(worker, "build", "c", "model", worker.host != "h0", message="no disk")
        bench.policy.observe(bench.view, trial)
    [verdict] = bench.judge(5.0)
    assert (verdict.host, verdict.worker) == ("h0", "") and "3 of 3 builds of model failed" in verdict.cause


def test_doubt_falls_at_once_on_who_never_answered_and_later_on_who_did():
    bench = Bench()
    bench.missed("h0/0")
    assert bench.doubts("h0/0"), "others may still show that it can be answered"
    bench.answered(*[name for name in bench.view.workers if name != "h0/0"], times=50)
    assert bench.doubts("h0/0")
    bench.view.now += 1.0
    bench.missed("h1/0")
    assert not bench.doubts("h1/0"), "it may be the item"
    bench.missed("h1/0")
    assert bench.doubts("h1/0")
    bench.answered("h1/0")
    assert not bench.doubts("h1/0")


def test_where_most_fail_nobody_is_in_doubt():
    bench = Bench()
    for name in bench.view.workers:
        bench.missed(name)
    bench.view.now += 1.0
    assert not any(bench.doubts(name) for name in bench.view.workers)


def test_what_nobody_does_any_more_is_forgotten():
    bench = Bench()
    for number in range(100):
        for worker in bench.view.workers.values():
            bench.policy.observe(bench.view, Trial(worker, "call", f"app{number}", "app", True))
    bench.judge(1.0)
    bench.view.now += 1000.0
    bench.judge(1.0)
    assert not bench.policy._fields and not bench.policy._known


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 1.5, 12.0])
def test_so_is_who_failed_at_it_and_what_was_evident_then(gone, seconds):
    bench = Bench()
    bench.answered(*bench.view.workers, times=50)
    bench.failed("h0/0", 8)
    bench.judge(seconds)
    if gone:
        for name in ("h0/0", "h0/1"):
            del bench.view.workers[name]
    for _ in range(3):
        bench.view.now += 3000.0
        bench.judge(3.0)
    assert not bench.policy._fields and not bench.policy._suspect and not bench.policy._due


def test_none_says_nothing():
    bench = Bench(NoQuarantine())
    bench.failed("h0/0", 100)
    assert bench.judge(10.0) == [] and not bench.doubts("h0/0")


def test_the_policy_of_the_documents():
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "health.md").read_text(), re.DOTALL)
    namespace = {}
    exec(code, namespace)
    bench = Bench(make("health", namespace["ThreeRunning"]()))
    bench.failed("h2/0", 2)
    assert bench.judge(1.0) == [] and bench.doubts("h2/1")
    bench.failed("h2/1")
    [verdict] = bench.judge(1.0)
    assert verdict.host == "h2" and bench.judge(1.0) == []
