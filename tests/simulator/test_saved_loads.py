"""What-ifs about loads: a zygote spares imports after the first, a host's cache files of a worker that comes back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_data import Clock
from test_fitting import recorded, site

from ctxflow.errors import UsageError
from ctxflow.executors.simulated import SimulatedMachine
from ctxflow.simulator import Origin, Part, TreeStaging
from ctxflow.simulator.recorded_run import fit
from ctxflow.simulator.scenario import Scenario, parse_change, recorded_scenario
from ctxflow.simulator.studies import play
from ctxflow.simulator.workload_file import WorkloadFile, problems
from ctxflow.sites import Site


def played(workers=1, level="none", **workload):
    """A run of batches of ten, each with a load of ten seconds, of which eight are imports."""
    context = {"load_seconds": 10.0, "load_spread": 0, "import_seconds": 8.0, **workload.pop("context", {})}
    values = {
        "apps": [{"items": 60, "item_seconds": 0.1, "spread": 0}],
        "contexts": [context],
        "dispatch_seconds": 0,
        "matching": {"seconds": 0},
        **workload,
    }
    made = Site(workers=workers, level=level, batching={"policy": "fixed", "size": 10})
    return play(Scenario(made, WorkloadFile.model_validate(values)))


@pytest.mark.parametrize(("zygote", "spared"), [("none", 0), ("worker", 5), ("host", 5)])
def test_loads_after_the_first_are_spared_their_imports(zygote, spared):
    result = played(zygote=zygote)
    assert result.loads == 6
    assert result.load_seconds == pytest.approx(60.0 - 8.0 * spared)


def test_a_zygote_goes_with_its_worker_or_outlives_it_on_its_host():
    def paid(zygote):
        """How many loads paid for their imports, on a worker that is evicted again and again."""
        apps = [{"items": 600, "item_seconds": 0.1, "spread": 0}]
        result = played(1, zygote=zygote, apps=apps, evictions={"per_hour": 60.0, "away_seconds": 1.0})
        assert result.joined > 2
        return round((result.load_seconds - 2.0 * result.loads) / 8.0), result.joined

    assert paid("host")[0] == 1
    loads, joined = paid("worker")
    assert 1 < loads <= joined


def test_loads_that_begin_before_the_first_is_over_pay_like_that():
    result = played(2, zygote="host", workers_per_host=2)
    assert result.load_seconds == pytest.approx(10.0 * 2 + 2.0 * (result.loads - 2))


def test_imports_that_take_longer_than_the_load_spare_no_more_than_all_of_it():
    assert played(zygote="worker", context={"import_seconds": 30.0}).load_seconds == pytest.approx(10.0)


def test_a_zygote_without_import_seconds_is_refused():
    made = WorkloadFile.model_validate({"zygote": "worker"})
    [problem] = problems(made, {})
    assert problem.path == ("zygote",)
    assert "import_seconds" in problem.text
    table = WorkloadFile.model_validate({"contexts": [{"import_seconds": {"a10": 3.0}}]})
    assert any("has no figure for tier" in problem.text for problem in problems(table, {"x": "titan"}))


# --- files

MODEL = Part("model", 100.0, "fs", unpacking=3.0)
OWN = Part("env", 100.0, "fs", shared=False, unpacking=2.0)


class Pool:
    """Hosts with a worker each, which comes and goes."""

    def __init__(self, cache):
        self.clock = Clock()
        origins = {"fs": Origin(1000.0, 100.0, 10.0)}
        self.staging = TreeStaging({"c": [MODEL, OWN]}, origins, peer_bandwidth=100.0, cache=cache)
        self.staging.attach(self.clock)
        self.count = 0

    def come(self, host):
        """A worker comes and asks; returns its name, and where the time will be at which it has all."""
        self.count += 1
        name, there = f"w{self.count}", []
        self.staging.fetch(name, SimulatedMachine(f"h{host}"), "c", lambda: there.append(self.clock.now))
        return name, there

    @property
    def moved(self):
        return sum(self.staging.moved.values())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.booleans())
def test_a_worker_that_comes_back_to_a_host_has_at_once_what_that_keeps(hosts, cache):
    pool, seen = Pool(cache), set()
    for host in hosts:
        before, began = pool.moved, pool.clock.now
        name, there = pool.come(host)
        pool.clock.run()
        kept = cache and host in seen
        assert (there[0] == began) == kept
        assert (pool.moved == before) == kept
        pool.staging.lost(name)
        seen.add(host)


def test_what_was_cut_off_is_not_kept_and_what_is_removed_is_gone():
    pool = Pool(cache=True)
    name, there = pool.come(0)
    pool.clock.run(until=0.5)
    pool.staging.lost(name)
    pool.clock.run()
    assert not there
    name, there = pool.come(0)
    pool.clock.run()
    assert there[0] > 1.0
    pool.staging.remove(name, "c")
    began = pool.clock.now
    _, there = pool.come(0)
    pool.clock.run()
    assert there[0] > began + 1.0


def test_a_host_that_keeps_a_file_sends_it_to_others():
    pool = Pool(cache=True)
    name, _ = pool.come(0)
    pool.clock.run()
    pool.staging.lost(name)
    pool.come(1)
    pool.come(0)
    pool.clock.run()
    assert pool.staging.moved["peers"] == 0, "it was asked for before a worker was on the host that keeps it"
    pool.come(2)
    pool.clock.run()
    assert pool.staging.moved["peers"] == 100


# --- recorded runs

CONTEXT = {"name": "llm", "load_seconds": 10.0, "load_spread": 0.1}
APP = {"name": "verify", "items": 4_000, "item_seconds": 0.3}


def log(parts, started="spawned"):
    """A log of a run with evictions, whose loads told this."""
    lines, _ = recorded(site(), {"apps": [APP], "contexts": [CONTEXT], "evictions": {"per_hour": 60}})
    told = f'"parts":{json.dumps(parts)},"started":"{started}"'
    return [text.replace('"parts":{},"started":""', told) for text in lines]


def what_if(found, *changes):
    return recorded_scenario(found, [parse_change(text) for text in changes])


def test_parts_of_a_log_are_fitted_and_asked_what_a_zygote_would_save():
    found = fit(log({"process": 0.5, "imports": 5.5, "weights": 3.0, "build": 1.0}))
    [context] = found.contexts
    assert set(context.import_seconds.values()) == {6.0}
    [values] = found.workload_values()["contexts"]
    assert values["import_seconds"] == {"a10": 6.0, "titan": 6.0}
    as_it_was = play(what_if(found))
    changed = play(what_if(found, "workload.zygote=host"))
    paid = changed.load_seconds / changed.loads
    assert as_it_was.load_seconds / as_it_was.loads == pytest.approx(10.0, rel=0.2)
    assert paid < 10.0
    given_by_hand = what_if(fit(log({})), "workload.zygote=worker", "workload.contexts.llm.import_seconds=6")
    assert play(given_by_hand).finished


def test_loads_of_forked_processes_say_nothing_of_imports():
    [context] = fit(log({"imports": 0.1, "build": 1.0}, "forked")).contexts
    assert context.import_seconds is None


def test_a_log_without_parts_cannot_be_asked_and_a_sentence_says_why():
    with pytest.raises(UsageError, match="a run whose event log has the parts of loads") as told:
        what_if(fit(log({})), "workload.zygote=worker")
    assert str(told.value).startswith("as changed by workload.zygote=worker: a zygote saves")
    assert "\n" not in str(told.value)


def test_a_log_may_be_asked_what_a_cache_would_save():
    workload = {
        "apps": [APP],
        "contexts": [{**CONTEXT, "unpack_seconds": 20.0}],
        "evictions": {"per_hour": 60, "away_seconds": 5.0},
    }
    lines, before = recorded(site(a10=4), workload)
    found = fit(lines)
    assert before.stage_seconds == pytest.approx(20.0 * before.loads, rel=0.5)
    _, after = recorded(site(a10=4), {**workload, "cache": True})
    assert after.stage_seconds == pytest.approx(20.0 * 4)
    assert play(what_if(found, "workload.cache=true")).finished
