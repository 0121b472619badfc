"""Contexts of which a worker keeps less than all from one call to the next: partial, and none."""

import json

import pytest
from scheduler_bench import Bench, only, run_of

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line, replay

LEVELS = ("none", "partial")


def bench_of(level, **options):
    bench = Bench()
    bench.context("model", files=True, level=level, **options)
    bench.app("verify", "model")
    return bench


def unload(level, worker="w1", context="model"):
    return cmd.Unload(worker, context, files=level == "none")


def first_run(bench, count=4, name="w1", **worker):
    """The first batch of items that are submitted before a worker joins."""
    bench.submit("verify", count)
    assert bench.join(name, **worker) == [cmd.Stage(name, "model")]
    assert bench.tell(ev.ContextStaged, name, "model") == [cmd.Load(name, "model")]
    return run_of(bench.ready(name, "model"))


def test_partial_builds_for_every_call_and_stages_once():
    bench = bench_of("partial")
    run = first_run(bench, 12)
    for _ in range(2):
        commands = bench.finish(run)
        assert only(commands, cmd.Deliver)
        rest = [command for command in commands if not isinstance(command, cmd.Deliver)]
        assert rest == [cmd.Unload("w1", "model"), cmd.Load("w1", "model")], "the next load waits for no answer"
        assert bench.tell(ev.ContextUnloaded, "w1", "model") == []
        run = run_of(bench.ready("w1", "model"))
    assert bench.finish(run)[-1] == cmd.Unload("w1", "model")
    assert not bench.state.workers["w1"].contexts
    assert bench.submit("verify", 1) == [cmd.Load("w1", "model")]


def test_none_stages_and_builds_for_every_call():
    bench = bench_of("none")
    run = first_run(bench, 8)
    assert bench.finish(run)[1:] == [cmd.Unload("w1", "model", files=True), cmd.Stage("w1", "model")]
    assert bench.tell(ev.ContextUnloaded, "w1", "model") == []
    assert bench.tell(ev.ContextStaged, "w1", "model") == [cmd.Load("w1", "model")]
    run = run_of(bench.ready("w1", "model"))
    assert bench.finish(run)[1:] == [cmd.Unload("w1", "model", files=True)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_call_ends_it_too(level):
    bench = bench_of(level)
    run = first_run(bench, 1)
    commands = bench.fail(run)
    assert unload(level) in commands and only(commands, cmd.Bury)


@pytest.mark.parametrize("level", LEVELS)
def test_what_ended_by_itself_is_not_ended_again_but_its_files_go(level):
    bench = bench_of(level)
    crashed = bench.fail(first_run(bench, 1), "crash", lost_context=True)
    assert only(crashed, cmd.Unload) == ([unload(level)] if level == "none" else [])
    bench = bench_of(level)
    first_run(bench, 1)
    died = bench.tell(ev.ContextUnloaded, "w1", "model")
    assert only(died, cmd.Unload) == ([unload(level)] if level == "none" else [])
    assert only(died, cmd.Stage if level == "none" else cmd.Load), "its item was queued again"
    bench = bench_of(level)
    run = first_run(bench, 1)
    assert bench.tell(ev.ItemsCancelled, [0], stop=True) == [cmd.Interrupt("w1", 1, "model")]
    assert only(bench.fail(run, "cancelled"), cmd.Unload) == [unload(level)]


def test_files_go_when_a_build_fails_and_partial_stages_anew_then():
    bench = bench_of("none")
    bench.submit("verify", 1)
    bench.join("w1", "w2")
    bench.tell(ev.ContextStaged, "w1", "model")
    assert bench.fail_context("w1", "model")[0] == unload("none")
    bench = bench_of("partial")
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.submit("verify", 1)
    bench.join("w1")
    bench.tell(ev.ContextStaged, "w1", "model")
    assert bench.fail_context("w1", "model") == []
    bench.now = bench.scheduler.next_wake
    assert cmd.Stage("w1", "model") in bench.tell(ev.Tick), "the files may be what was wrong"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("routing", ["context-affinity", "least-loaded", "round-robin"])
def test_a_second_slot_shares_no_built_state_and_other_workers_take_the_work(level, routing):
    bench = Bench(routing=routing, batching={"policy": "fixed", "size": 1, "share": False})
    bench.context("model", level=level)
    bench.app("verify", "model")
    bench.submit("verify", 3)
    assert bench.join("w1", slots=2) == [cmd.Load("w1", "model")]
    run = run_of(bench.ready("w1", "model"))
    assert bench.join("w2", slots=2) == [cmd.Load("w2", "model")], "the other slot of w1 is of no use to it"
    bench.app("add")
    assert bench.submit("add", 1) == [cmd.Load("w1", "")], "but to others"
    assert bench.finish(run)[1:] == [unload(level), cmd.Load("w1", "model")]


@pytest.mark.parametrize("level", LEVELS)
def test_one_recipe_at_two_levels_is_two_contexts(level):
    bench = Bench()
    bench.app("kept", "model")
    bench.context("model-x", level=level)
    bench.app("measured", "model-x")
    bench.join("w1")
    assert bench.submit("kept", 1) == [cmd.Load("w1", "model")]
    run = run_of(bench.ready("w1", "model"))
    assert bench.finish(run)[1:] == [], "it is retained"
    assert bench.submit("measured", 1) == [cmd.Load("w1", "model-x")]
    run = run_of(bench.ready("w1", "model-x"))
    assert bench.finish(run)[1:] == [unload(level, context="model-x")]
    assert list(bench.state.workers["w1"].contexts) == ["model"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_worker_between_two_calls_is_free_for_whoever_is_more_urgent(level):
    bench = bench_of(level)
    run = first_run(bench, 8)
    bench.app("urgent", priority=1)
    bench.submit("urgent", 1)
    commands = bench.finish(run)
    assert commands[1:] == [unload(level), cmd.Load("w1", "")]
    assert bench.state.apps["verify"].claimed == 0, "a claim on the worker is made when it loads, no sooner"
    urgent = run_of(bench.ready("w1", ""))
    assert only(bench.finish(urgent), cmd.Stage if level == "none" else cmd.Load)


@pytest.mark.parametrize("level", LEVELS)
def test_what_makes_room_is_unloaded_at_its_own_level(level):
    bench = Bench()
    bench.context("model", level=level, memory=60)
    bench.app("verify", "model")
    bench.app("other", "large")
    bench.state.contexts["large"].memory = 60
    bench.submit("verify", 1)
    bench.join("w1", memory=100)
    bench.tell(ev.ItemsCancelled, [0])
    assert bench.ready("w1", "model") == [], "it was built for nothing, and waits for the next call"
    assert bench.submit("other", 1) == [unload(level), cmd.Load("w1", "large")]


def test_logs_of_earlier_versions_replay():
    """They have contexts without a level, and `Unload` without `files`."""
    bench, lines = Bench(), []

    def tell(kind, *values):
        event = kind(0.0, *values)
        lines.append(line(event, bench.scheduler.handle(event)) + "\n")

    for name in ("one", "two"):
        tell(ev.ContextDeclared, ev.ContextSpec(name, name, memory=60))
        tell(ev.AppDeclared, ev.AppSpec(name, name, context=name))
    tell(ev.WorkerJoined, ev.WorkerSpec("w", memory=100))
    tell(ev.ItemsSubmitted, "one", range(1))
    tell(ev.ContextReady, "w", "one", 1.0)
    tell(ev.BatchFinished, "w", 1, 1.0)
    tell(ev.ItemsSubmitted, "two", range(1, 2))
    assert '"is":"Unload"' in lines[-1], "it is what this log is about"
    old = [text.replace(',"files":false}', "}").replace(',"level":"pervasive"', "") for text in lines]
    assert old != lines and "level" not in "".join(old)
    assert replay(lines, Bench().scheduler) == replay(old, Bench().scheduler) == len(lines)
    changed = [text.replace(',"files":false}', ',"files":true}') for text in lines]
    with pytest.raises(ValueError, match="led to"):
        replay(changed, Bench().scheduler)
    assert json.loads(lines[0])["event"]["context"]["level"] == "pervasive"
