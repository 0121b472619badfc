"""What becomes of contexts on workers: suspects, broken ones, unloading, memory, GPUs."""

import pytest
from scheduler_bench import Bench, only, run_of

from ctxflow.policies.protocols import Plan
from ctxflow.policies.simple import LeastLoaded
from ctxflow.scheduler import Limits
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

# --- contexts


def test_a_context_that_fails_on_k_workers_is_broken_and_its_items_die_at_once():
    bench = Bench(Limits(failures=3))
    bench.app("verify", "model")
    bench.submit("verify", 9)
    assert len(bench.join("w1", "w2", "w3", "w4")) == 3, "three batches of four hold nine items"
    for worker in ("w1", "w2"):
        commands = bench.fail_context(worker, "model")
        assert not only(commands, cmd.Bury)
    assert not only(bench.fail_context("w3", "model"), cmd.Bury), "w4 still builds it"
    [bury] = bench.fail_context("w4", "model")
    assert (list(bury.items), bury.context) == (list(range(9)), "model")
    [bury] = bench.submit("verify", 2)
    assert list(bury.items) == [9, 10], "later ones at once"
    assert bench.submit("verify", 0) == []


def test_a_context_that_fails_on_one_worker_makes_that_worker_suspect():
    bench = Bench(Limits(failures=3))
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert bench.join("w1", "w2") == [cmd.Load("w1", "model")]
    assert bench.fail_context("w1", "model") == [cmd.Load("w2", "model")], "another worker is asked"
    run = run_of(bench.ready("w2", "model"))
    bench.submit("verify", 8)
    assert "model" not in bench.state.workers["w1"].contexts, "while others can, the suspect is not asked"
    assert bench.finish(run)


def test_the_only_worker_is_asked_again_after_a_pause_that_doubles():
    bench = Bench(Limits(failures=2, retry_seconds=5.0))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))  # Four were asked for; one has come.
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.join("w1")
    assert bench.fail_context("w1", "model") == []
    assert bench.scheduler.next_wake == 5.0
    bench.now = 4.9
    assert not only(bench.tell(ev.Tick), cmd.Load)
    bench.now = 5.0
    assert only(bench.tell(ev.Tick), cmd.Load) == [cmd.Load("w1", "model")]
    assert bench.fail_context("w1", "model") == []
    assert bench.scheduler.next_wake == 15.0
    bench.now = 15.0
    assert only(bench.tell(ev.Tick), cmd.Load)
    run = run_of(bench.ready("w1", "model"))
    assert not bench.state.contexts["model"].suspects, "a worker that builds it is cleared"
    bench.finish(run)


class OnTier:
    """Permits the context "model" on the tier "default" only."""

    def plan(self, view):
        return Plan({"model": frozenset({"default"})})


@pytest.mark.parametrize("why", ["no GPU", "not permitted", "noticed", "draining"])
def test_a_suspect_is_asked_again_where_no_other_worker_could_build_the_context(why):
    bench = Bench(Limits(failures=2, retry_seconds=5.0), placement=OnTier())
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.tell(ev.Tick)
    bench.context("model", gpus=1)
    bench.app("verify", "model")
    bench.join("w0", gpus=0 if why == "no GPU" else 1, tier="other" if why == "not permitted" else "default")
    if why == "noticed":
        bench.tell(ev.EvictionNotice, "w0")
    if why == "draining":
        bench.state.drain(bench.state.workers["w0"])
    bench.submit("verify", 1)
    assert bench.join("w1", gpus=1) == [cmd.Load("w1", "model")]
    assert bench.fail_context("w1", "model") == []
    bench.now = bench.scheduler.next_wake
    assert only(bench.tell(ev.Tick), cmd.Load) == [cmd.Load("w1", "model")]


def test_only_workers_that_could_build_a_context_are_waited_for_before_it_is_broken():
    bench = Bench(Limits(failures=3), placement=OnTier())
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 1))
    bench.tell(ev.TierOffered, ev.TierSpec("other", 0, 9))
    bench.tell(ev.Tick)
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.join("w1", "w2", "w3", tier="other")
    assert bench.join("w4", tier="default") == [cmd.Load("w4", "model")]
    [bury] = bench.fail_context("w4", "model")
    assert bury.context == "model"


def test_a_worker_that_keeps_failing_alone_breaks_the_context_in_the_end():
    bench = Bench(Limits(failures=2))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.app("verify", "model")
    bench.submit("verify", 1)
    bench.join("w1")
    buried = []
    for _ in range(6):
        buried += only(bench.fail_context("w1", "model"), cmd.Bury)
        bench.now += 10_000
        bench.tell(ev.Tick)
    assert [list(command.items) for command in buried] == [[0]]


def test_failures_between_loads_that_worked_do_not_add_up():
    bench = Bench(Limits(failures=2))
    bench.app("verify", "model")
    for round_ in range(7):
        bench.submit("verify", 1)
        bad, good = f"bad{round_}", f"good{round_}"
        assert bench.join(bad) == [cmd.Load(bad, "model")]
        bench.join(good)
        assert bench.fail_context(bad, "model") == [cmd.Load(good, "model")]
        bench.finish(run_of(bench.ready(good, "model")))
        assert bench.state.contexts["model"].failures == 0 and not bench.state.contexts["model"].failed_workers
        bench.lose(good, evicted=True)
        bench.lose(bad, evicted=True)
    assert bench.state.contexts["model"].broken is None


def test_a_context_whose_build_ends_its_workers_is_broken_in_the_end():
    bench = Bench(Limits(failures=1))
    bench.context("model", files=True)
    bench.app("verify", "model")
    bench.submit("verify", 2)
    for worker in ("w1", "w2"):
        bench.now += 1
        assert bench.join(worker) == [cmd.Stage(worker, "model")]
        assert bench.lose(worker) == [], "another may come in its place"
    bench.now += 1
    bench.join("w3")
    bench.tell(ev.ContextStaged, "w3", "model")
    [bury] = bench.lose("w3")
    assert (list(bury.items), bury.context, bury.failure.kind) == ([0, 1], "model", "lost")
    assert "3 workers running were lost, without notice, while they were building it" in bury.failure.message.replace(
        "the context", "it"
    )
    assert [list(c.items) for c in bench.submit("verify", 1)] == [[2]]


def test_workers_that_are_lost_together_while_they_build_count_once():
    bench = Bench(Limits(failures=1))
    bench.app("verify", "model")
    bench.submit("verify", 500)
    workers = [f"w{n}" for n in range(5)]
    for worker in workers:
        bench.join(worker)
    for worker in workers:
        assert bench.lose(worker) == []
    assert bench.state.contexts["model"].losses == 1
    bench.worker_with("model", "w9")
    assert bench.state.contexts["model"].losses == 0


def test_an_eviction_or_a_context_that_was_built_before_blames_no_context():
    bench = Bench(Limits(failures=1))
    bench.app("verify", "model")
    bench.submit("verify", 2)
    bench.join("w1")
    assert bench.lose("w1", evicted=True) == []
    bench.join("w2")
    bench.tell(ev.EvictionNotice, "w2")
    assert bench.lose("w2") == []
    bench.worker_with("model", "w3")
    assert bench.lose("w3") == []
    assert bench.state.contexts["model"].failures == 0


def test_one_app_with_a_broken_context_leaves_others_alone():
    bench = Bench(Limits(failures=1))
    bench.app("bad", "broken")
    bench.app("good", "model")
    bench.submit("bad", 2)
    bench.submit("good", 2)
    bench.join("w1")
    commands = bench.fail_context("w1", "broken")
    assert [list(c.items) for c in only(commands, cmd.Bury)] == [[0, 1]]
    assert only(commands, cmd.Load) == [cmd.Load("w1", "model")]


def test_a_lost_library_process_gives_its_items_back():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 2)
    bench.worker_with("model")
    assert bench.tell(ev.ContextUnloaded, "w1", "model") == [cmd.Load("w1", "model")]
    assert list(run_of(bench.ready("w1", "model")).items) == [0, 1]


def held(bench, worker="w1"):
    return sorted(bench.state.workers[worker].contexts)


def test_the_least_recently_used_context_is_unloaded_when_memory_is_short():
    bench = Bench()
    for name in "abcd":
        bench.context(name, memory=40)
        bench.app(name, name)
    bench.join("w1", memory=100)
    for name in "ab":
        assert bench.submit(name, 1) == [cmd.Load("w1", name)]
        bench.now += 1
        bench.finish(run_of(bench.ready("w1", name)))
    bench.now += 1
    bench.finish(run_of(bench.submit("a", 1)))  # Now b is the one used longest ago.
    assert bench.submit("c", 1) == [cmd.Unload("w1", "b"), cmd.Load("w1", "c")]
    bench.finish(run_of(bench.ready("w1", "c")))
    assert held(bench) == ["a", "c"]


def test_a_policy_sees_what_would_give_way_to_a_context():
    seen = {}

    class Looks(LeastLoaded):
        def assign(self, view, ready):
            seen.update({app.id: tuple(view.gives_way(app, view.workers["w1"])) for app in ready})
            return super().assign(view, ready)

    bench = Bench(routing=Looks())
    for name, memory in {"a": 40, "b": 40, "c": 50, "d": 100}.items():
        bench.context(name, memory=memory)
        bench.app(name, name)
    bench.join("w1", memory=100)
    for name in "ab":
        bench.submit(name, 1)
        bench.now += 1
        bench.finish(run_of(bench.ready("w1", name)))
    assert seen == {"a": (), "b": ()}, "there is room for both"
    bench.finish(run_of(bench.submit("b", 1)))
    assert seen["b"] == (), "it is there"
    bench.submit("c", 1)
    assert seen["c"] == ("a",), "least recently used first, as far as it has to"
    bench.finish(run_of(bench.ready("w1", "c")))
    bench.submit("d", 1)
    assert seen["d"] == ("b", "c")


def test_the_larger_of_declared_and_measured_memory_counts():
    bench = Bench()
    for name in "ab":
        bench.context(name, memory=10)
        bench.app(name, name)
    bench.join("w1", memory=100)
    bench.submit("a", 1)
    bench.finish(run_of(bench.ready("w1", "a", memory=95)))
    assert bench.submit("b", 1) == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]


def test_the_most_memory_that_was_measured_anywhere_counts():
    bench = Bench()
    for name in "ab":
        bench.context(name, memory=10)
        bench.app(name, name)
    bench.join("w1", "w2", memory=100)
    assert bench.submit("a", 2) == [cmd.Load("w1", "a"), cmd.Load("w2", "a")]
    bench.finish(run_of(bench.ready("w1", "a", memory=95)))
    bench.ready("w2", "a", memory=50)  # Its pages are shared with the first worker's.
    assert bench.submit("b", 1) == [cmd.Unload("w2", "a"), cmd.Load("w2", "b")]


def test_a_context_larger_than_the_worker_is_tried_when_it_is_alone():
    bench = Bench()
    bench.context("huge", memory=1000)
    bench.app("huge", "huge")
    bench.submit("huge", 1)
    assert bench.join("w1", memory=100) == [cmd.Load("w1", "huge")]


def test_contexts_share_a_gpu_only_where_their_sizes_are_known_to_fit():
    bench = Bench()
    for name, size in {"a": 40, "b": 40, "unknown": None}.items():
        bench.context(name, gpus=1, gpu_memory=size)
        bench.app(name, name)
    bench.join("w1", gpus=1, gpu_memory=100)
    for name in "ab":
        assert bench.submit(name, 1) == [cmd.Load("w1", name)]
        bench.finish(run_of(bench.ready("w1", name)))
    assert bench.submit("unknown", 1) == [cmd.Unload("w1", "a"), cmd.Unload("w1", "b"), cmd.Load("w1", "unknown")]


def test_a_context_with_gpus_never_goes_to_a_worker_without():
    bench = Bench()
    bench.context("model", gpus=1)
    bench.app("verify", "model")
    bench.submit("verify", 1)
    assert bench.join("w1", gpus=0) == []
    assert bench.join("w2", gpus=1) == [cmd.Load("w2", "model")]


def test_out_of_memory_unloads_the_others_and_tries_again():
    bench = Bench(Limits(failures=1))
    for name in "ab":
        bench.app(name, name)
    bench.join("w1")
    bench.submit("a", 1)
    bench.finish(run_of(bench.ready("w1", "a")))
    assert bench.submit("b", 1) == [cmd.Load("w1", "b")]
    assert bench.fail_context("w1", "b", kind="memory") == [cmd.Unload("w1", "a"), cmd.Load("w1", "b")]
    [bury] = bench.fail_context("w1", "b", kind="memory")
    assert bury.context == "b", "with nothing left to unload it is a failure like any other"


def test_no_more_workers_load_a_context_than_its_items_need():
    bench = Bench()
    bench.app("verify", "model")
    bench.submit("verify", 4)
    assert bench.join("w1", "w2") == [cmd.Load("w1", "model")]
    assert bench.submit("verify", 1) == [cmd.Load("w2", "model")]
