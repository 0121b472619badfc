"""Parameters that are measured of a run: those of simulated runs, whose true ones are known, come back."""

import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.observe.transfers import MANAGER, ContextFile, Transfer, Transfers
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line
from ctxflow.simulator.recorded_log import Sums, call_cost
from ctxflow.simulator.recorded_run import fit
from ctxflow.simulator.scenario import Scenario, recorded_scenario
from ctxflow.simulator.studies import build, play, run
from ctxflow.simulator.workload_file import WorkloadFile
from ctxflow.sites import Site


def site(batching="opportunistic", **tiers):
    tiers = tiers or {"a10": 6, "titan": 4}
    return Site(
        engine="taskvine", batching=batching, tiers=[{"name": name, "workers": count} for name, count in tiers.items()]
    )


def recorded(made, workload, seed=0):
    """A simulated run's log, as a live run would have written it, and what came of the run."""
    lines = []
    built = build(
        Scenario(made, WorkloadFile.model_validate(workload)), seed, lambda e, c: lines.append(line(e, c) + "\n")
    )
    lines.append(first_line(built.simulation.scheduler) + "\n")
    return lines, run(built)


APP = {
    "name": "verify",
    "items": 20_000,
    "item_seconds": {"a10": 0.3, "titan": 0.5},
    "spread": 0.6,
    "call_seconds": 1.5,
}
CONTEXT = {"name": "llm", "load_seconds": {"a10": 10.0, "titan": 20.0}, "load_spread": 0.2}


def test_known_parameters_come_back():
    workload = {
        "apps": [APP],
        "contexts": [CONTEXT],
        "evictions": {"per_hour": 30},
        "dispatch_seconds": 0.25,
        "matching": {"seconds": 4.0, "spread": 0.0},
    }
    lines, result = recorded(site(), workload)
    found = fit(lines)
    [app], [context] = found.apps, found.contexts
    assert (app.name, app.context, app.arrivals, context.name) == ("verify", "llm", ((0.0, 20_000),), "llm")
    assert app.item_seconds["a10"] == pytest.approx(0.3, rel=0.03)
    assert app.item_seconds["titan"] == pytest.approx(0.5, rel=0.03)
    assert app.call_seconds == pytest.approx(1.5, rel=0.15)
    assert app.spread == pytest.approx(0.6, rel=0.15)
    assert found.dispatch_seconds == pytest.approx(0.25, rel=1e-6)
    assert found.matching_seconds == pytest.approx(4.0, rel=0.01)
    assert context.load_seconds["a10"] == pytest.approx(10.0, rel=0.1)
    assert context.load_seconds["titan"] == pytest.approx(20.0, rel=0.1)
    assert context.load_spread == pytest.approx(0.2, rel=0.35)
    assert all(0.9 < stay.pace < 1.1 for place in found.places for stay in place.stays)
    assert (found.seconds, found.done, found.evicted) == (result.seconds, result.done, result.evicted)
    assert (found.loads, found.lost_items, found.open) == (result.loads, result.lost_items, 0)


@settings(max_examples=5, deadline=None)
@given(
    item=st.floats(0.05, 2.0),
    call=st.floats(0.0, 3.0),
    load=st.floats(1.0, 40.0),
    per_hour=st.sampled_from([0.0, 20.0, 60.0]),
    batching=st.sampled_from(["opportunistic", {"policy": "fixed", "size": 30}]),
)
def test_what_was_measured_simulates_to_the_makespan_of_the_run(item, call, load, per_hour, batching):
    app = {"items": 4000, "item_seconds": {"a10": item, "titan": 2 * item}, "call_seconds": call}
    evictions = {"per_hour": per_hour, "away_seconds": 20}
    # Of few loads, the luck of each would be most of a short run.
    contexts = [{"load_seconds": load, "load_spread": 0.1}]
    workload = {"apps": [app], "contexts": contexts, "evictions": evictions}
    lines, result = recorded(site(batching), workload, seed=3)
    scenario = recorded_scenario(fit(lines))
    again = statistics.median(play(scenario, seed).seconds for seed in (7, 8, 9))
    assert again == pytest.approx(result.seconds, rel=0.15)


def test_a_worker_that_is_slower_than_its_kind_is_told_from_luck():
    lines, _ = recorded(site({"policy": "fixed", "size": 10}, a10=6), {"apps": [{**APP, "call_seconds": 0.0}]})
    slow = []
    for text in lines:
        record = json.loads(text)
        event = record.get("event", {})
        if event.get("is") == "BatchFinished" and event["worker"].startswith("a10-2-"):
            event["seconds"] *= 1.5  # Its clock runs fast; what the run decided is of no matter here.
        slow.append(json.dumps(record) + "\n")
    paces = {stay.worker: stay.pace for place in fit(slow).places for stay in place.stays}
    others = [pace for worker, pace in paces.items() if not worker.startswith("a10-2-")]
    [pace] = [pace for worker, pace in paces.items() if worker.startswith("a10-2-")]
    assert pace / (sum(others) / len(others)) == pytest.approx(1.5, rel=0.05)


def test_places_are_as_many_as_there_were_workers_at_a_time():
    workload = {"apps": [APP], "contexts": [CONTEXT], "evictions": {"per_hour": 60, "away_seconds": 5}}
    lines, result = recorded(site(), workload)
    found = fit(lines)
    assert result.joined == found.joined == sum(len(place.stays) for place in found.places)
    assert sorted(place.tier for place in found.places) == ["a10"] * 6 + ["titan"] * 4
    for place in found.places:
        for before, after in zip(place.stays, place.stays[1:], strict=False):
            assert before.until <= after.joined
        assert place.stays[-1].until == math.inf or place.stays[-1].until <= found.seconds


def test_items_that_come_while_others_wait_count_as_one_arrival():
    spread_out = {"arrivals": [[0.0, 1000], [5.0, 1000], [5000.0, 10], [9000.0, 10]]}
    app = {"name": "verify", "item_seconds": 0.3, **spread_out}
    lines, _ = recorded(site(), {"apps": [app]})
    [fitted] = fit(lines).apps
    assert fitted.arrivals == ((0.0, 2000), (5000.0, 10), (9000.0, 10))


def test_what_was_cancelled_or_never_answered_is_left_out():
    workload = {"apps": [{"name": "verify", "items": 500, "item_seconds": 1.0}]}
    lines, _ = recorded(site(), workload)
    half = lines[: len(lines) // 2]
    found = fit(half)
    assert found.open > 0
    assert found.items == found.done == 500 - found.open
    assert any("no answer when its log ended" in doubt for doubt in found.doubts)
    cancelled = line(ev.ItemsCancelled(1e9, range(10)), []) + "\n"
    assert fit([*half, cancelled]).items + fit([*half, cancelled]).open >= found.items - 10


def test_apps_that_are_called_alike_are_kept_apart():
    apps = [{"name": "one", "items": 200, "context": "a"}, {"name": "two", "items": 300, "context": "b"}]
    contexts = [{"name": "a", "load_seconds": 1}, {"name": "b", "load_seconds": 2}]
    lines, _ = recorded(site(), {"apps": apps, "contexts": contexts})
    alike = [text.replace('"name":"two"', '"name":"one"').replace('"name":"b"', '"name":"a"') for text in lines]
    found = fit(alike)
    assert sorted((app.name, app.context, app.arrivals[0][1]) for app in found.apps) == [
        ("one", "a", 200),
        ("one-2", "a-2", 300),
    ]
    assert play(recorded_scenario(found)).done == 500


def test_contexts_that_load_in_no_time_have_no_spread():
    lines, _ = recorded(site(), {"apps": [{"items": 200}], "contexts": [{"name": "llm", "load_seconds": 0}]})
    [context] = [each for each in fit(lines).contexts if each.name == "llm"]
    assert (context.load_spread, context.load_seconds["a10"]) == (0.0, 0.0)


def test_files_that_were_sent_give_sizes_and_speeds():
    context = {"name": "llm", "load_seconds": 1, "files_gb": 1.0, "unpack_seconds": 3.0}
    workload = {"apps": [{"items": 500}], "contexts": [context], "links": {"driver": 8, "peers": 8}}
    lines, _ = recorded(site(a10=4), workload)
    sent = [
        Transfer("f", sender, "w", "sent", 0.0, 0.0, 1.0, 10**9)
        for sender in (MANAGER, "a", "b")
    ]  # fmt: skip
    found = fit(lines, "run", Transfers(sent, {"f": ContextFile("f", "weights", 10**9, "llm")}))
    [fitted] = found.contexts
    assert (fitted.size, found.rates) == (1e9, (1e9, 1e9))
    assert fitted.stage_seconds == pytest.approx(3.0, abs=0.1)
    assert play(recorded_scenario(found)).moved["peers"] > 0


def test_without_notes_of_files_staging_is_a_fixed_time():
    context = {"name": "llm", "load_seconds": 1, "unpack_seconds": 3.0}
    lines, _ = recorded(site(a10=4), {"apps": [{"items": 500}], "contexts": [context]})
    [fitted] = fit(lines).contexts
    assert (fitted.size, fitted.stage_seconds) == (0.0, pytest.approx(3.0))


def test_calls_of_one_size_do_not_tell_what_a_call_costs():
    sums = Sums()
    for _ in range(10):
        sums.add(5, 2.5)
    assert call_cost([sums]) == 0.0


def test_logs_that_say_too_little():
    lines, _ = recorded(site(), {"apps": [{"name": "verify", "items": 500, "call_seconds": 0.5}]})
    head, *events = lines
    assert fit([head, *events]).doubts == []
    old = fit(events)
    assert old.setup is None
    assert "earlier version of ctxflow, which did not note the run's policies" in old.doubts[0]
    assert play(recorded_scenario(old)).done == 500
    own = head.replace(
        '{"policy":"opportunistic","most":100000,"window":null,"most_window":1024}', '{"object":"mine:Policy"}'
    )
    assert own != head
    assert "batching policy was an object of the program's" in fit([own, *events]).doubts[0]
    with pytest.raises(ValueError, match="no call was answered in run"):
        fit([head, *events[:5]])
    with pytest.raises(ValueError, match="line 2 is no line of an event log"):
        fit([head, "{}\n", *events])
    assert fit([head, *events[:-1], events[-1][:20]]).done == fit([head, *events[:-1]]).done


def test_what_warming_up_costs_counts_with_the_load():
    lines, _ = recorded(site({"policy": "fixed", "size": 10}, a10=4), {"apps": [{**APP, "items": 2000}]})
    seen, slow = set(), []
    for text in lines:
        record = json.loads(text)
        event = record.get("event", {})
        if event.get("is") == "BatchFinished" and event["worker"] not in seen:
            seen.add(event["worker"])
            event["seconds"] += 40.0
        slow.append(json.dumps(record) + "\n")
    [cold], [warm] = fit(lines).contexts, fit(slow).contexts
    assert warm.load_seconds["a10"] - cold.load_seconds["a10"] == pytest.approx(40.0, rel=0.15)
    assert fit(slow).apps[0].item_seconds == fit(lines).apps[0].item_seconds


def test_kinds_of_worker_are_gpu_models_where_they_are_known():
    lines, _ = recorded(site(gpu=4), {"apps": [{**APP, "item_seconds": 0.3, "items": 2000}]})
    mixed = [text.replace('"gpu_model":"gpu"', '"gpu_model":"A10"' if n % 2 else '"gpu_model":"L4"')
             for n, text in enumerate(lines)]  # fmt: skip
    found = fit(mixed)
    assert set(found.apps[0].item_seconds) == {"gpu", "A10", "L4"}
    assert play(recorded_scenario(found)).done == 2000


def test_apps_that_answer_one_by_one_are_told_by_their_answers():
    app = {**APP, "items": 4000, "salvage": True}
    workload = {"apps": [app], "evictions": {"per_hour": 120, "notice_seconds": 5, "away_seconds": 10}}
    lines, result = recorded(site({"policy": "fixed", "size": 50}), workload)
    assert any("ItemsFinished" in text for text in lines) and any("BatchEnded" in text for text in lines)
    found = fit(lines)
    [fitted] = found.apps
    assert fitted.salvage
    assert fitted.item_seconds["a10"] == pytest.approx(0.3, rel=0.1)
    assert found.notice_seconds == pytest.approx(5.0, abs=0.1)
    assert found.lost_items == result.lost_items
    again = play(recorded_scenario(found), seed=5)
    assert again.seconds == pytest.approx(result.seconds, rel=0.1)
    assert not fit(recorded(site(), {"apps": [APP]})[0]).apps[0].salvage
