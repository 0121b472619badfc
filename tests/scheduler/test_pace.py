import random

import pytest
from scheduler_bench import Bench, run_of

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.app_state import CallCost


def test_before_there_are_pairs_all_of_a_call_may_be_cost():
    cost = CallCost()
    assert cost.seconds is None
    cost.add(way=0.1, whole=3.0)
    assert (cost.seconds, cost.inside) == (pytest.approx(3.1), 0.0)


def test_batches_of_about_the_same_size_tell_nothing():
    cost = CallCost()
    cost.add_pair((10, 5.0), (14, 6.0))
    cost.add_pair((10, 0.0), (30, 0.0))
    assert cost.pairs == 0


@pytest.mark.parametrize("true", [0.0, 0.5, 5.0])
def test_the_cost_is_found_in_noise(true):
    drawn, cost = random.Random(1), CallCost()
    cost.add(way=0.0, whole=1.0)

    def seconds(n):
        return true + sum(drawn.gammavariate(4, 0.3 / 4) for _ in range(n))

    for _ in range(300):
        cost.add_pair((4, seconds(4)), (12, seconds(12)), 0.3)
    assert cost.inside == pytest.approx(true, rel=0.05, abs=0.15)
    assert cost.seconds == cost.inside, "it has no way to go"


def test_a_few_pairs_that_happen_to_differ_prove_no_cost():
    cost = CallCost()
    cost.add(way=0.1, whole=20.0)
    for _ in range(3):
        cost.add_pair((6, 22.0), (12, 31.0), 2.5)
    assert cost.seconds < 1.5, "the line through them would have it at 13"


def test_a_workers_speed_is_measured_without_what_its_calls_cost():
    bench = Bench(batching={"policy": "fixed", "size": 64, "share": False})
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.join("w1")
    run = run_of(bench.ready("w1", "model"))
    for n in (4, 16, 2, 32, 64):
        bench.submit("verify", n)
        run = finish(bench, run, 2.0 + 0.5 * len(run.items), way=0.25)
    worker = bench.view.workers["w1"]
    assert bench.state.apps["verify"].shown.call_seconds == pytest.approx(2.25, rel=0.25), "little is known yet"
    assert worker.items_done("verify") == 1 + 4 + 16 + 2 + 32
    finish(bench, run, 2.0 + 0.5 * len(run.items), way=0.25)
    assert worker.seconds_per_item("verify") == pytest.approx(0.5, rel=0.2)
    assert (worker.items_done("other"), worker.seconds_per_item("other")) == (0, None)


def test_batches_of_one_are_no_trap_for_a_cost_that_was_missed():
    drawn = random.Random(2)
    bench = Bench(batching="opportunistic")
    bench.app("verify", "model")
    bench.submit("verify", 1000)
    bench.join("w1")
    run = run_of(bench.ready("w1", "model"))
    bench.state.apps["verify"].call_cost.add_pair((1, 8.0), (3, 12.0), 4.0)
    bench.state.apps["verify"].call_cost.total = -1.0  # Bad luck with items that spread by their mean.
    items = 0
    for _ in range(200):
        bench.submit("verify", len(run.items))
        items += len(run.items)
        run = finish(bench, run, 0.6 + sum(drawn.expovariate(1 / 4) for _ in run.items), way=0.006)
    assert items > 200 * 4, "with four items a call, its cost is a thirtieth of the time"


def finish(bench, run, seconds, way):
    bench.now += seconds + way
    commands = bench.tell(ev.BatchFinished, run.worker, run.attempt, seconds)
    return run_of(commands) if any(type(c).__name__ == "Run" for c in commands) else None
