"""Sites and workloads as files, with changes: what becomes of them, and what is wrong with them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import UsageError
from ctxflow.observe.history_reader import read_history
from ctxflow.scheduler.log import replay
from ctxflow.simulator.pools import during, faults_of, machines
from ctxflow.simulator.scenario import Scenario, combinations, load_scenario, parse_change, parse_sweep
from ctxflow.simulator.simulation import fluid_seconds, mixed_fluid_seconds
from ctxflow.simulator.studies import Case, build, machines_of, play, study
from ctxflow.simulator.workload_file import FaultEntry, WorkloadError, WorkloadFile
from ctxflow.sites import Site

SITE = """
engine = "taskvine"
batching = "opportunistic"
[[tiers]]
name = "a10"
workers = 4
require_gpus = 'DeviceName == "NVIDIA A10"'
[[tiers]]
name = "spot"
workers = 6
boot_seconds = 30
"""
WORKLOAD = """
[[apps]]
items = 3000
item_seconds = {"NVIDIA A10" = 0.2, spot = 0.4}
[[contexts]]
load_seconds = 15
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "work.toml").write_text(WORKLOAD)

    def load(*changes, workload=None, site=None):
        if workload is not None:
            (tmp_path / "work.toml").write_text(workload)
        if site is not None:
            (tmp_path / "site.toml").write_text(site)
        return load_scenario(
            str(tmp_path / "site.toml"), tmp_path / "work.toml", [parse_change(text) for text in changes]
        )

    return load


def test_a_workload_of_five_lines(files):
    result = play(files())
    assert (result.done, result.finished, result.loads, result.joined) == (3000, True, 10, 10)
    assert 0.5 < result.efficiency < 1
    assert result.seconds > result.fluid_seconds > 3000 / (4 / 0.2 + 6 / 0.4)


def test_the_same_seed_gives_the_same_and_every_file_has_defaults(files):
    scenario = files("workload.evictions.per_hour=60")
    assert play(scenario, 1) == play(scenario, 1) != play(scenario, 2)
    assert play(Scenario(Site(workers=2), WorkloadFile())).done == 1000


def test_changes_reach_both_files(files):
    scenario = files(
        "batching.size=7", "batching.policy=fixed", "tiers.a10.workers=40", "tiers.spot.workers=0.5x", "level=partial",
        "workload.evictions.per_hour=6", "workload.apps.app.items=2x", "workload.links.peers=10", "tiers.1.price=0.5",
    )  # fmt: skip
    site, workload = scenario.site, scenario.workload
    assert site.batching == {"policy": "fixed", "size": 7}
    assert [(tier.workers, tier.price) for tier in site.tiers] == [(40, None), (3, 0.5)]
    assert (site.level, workload.evictions.per_hour, workload.links.peers) == ("partial", 6, 10)
    assert workload.apps[0].items == 6000
    assert [tier.workers for tier in files("workers=3x").site.tiers] == [12, 18]
    assert files("workload.apps.app.item_seconds=2x").workload.apps[0].item_seconds == {"NVIDIA A10": 0.4, "spot": 0.8}
    assert files("batching=").site.batching == "fixed"
    assert files("workload.contexts.0.load_seconds=").workload.contexts[0].load_seconds == 15.0


@pytest.mark.parametrize(
    ("workload", "line", "says"),
    {
        "a typing error": ("[[apps]]\nitmes = 3", 2, "an app has no key 'itmes' (app 1): did you mean 'items'?"),
        "of a table": ("[links]\npeer = 3", 2, "[links] has no key 'peer': did you mean 'peers'?"),
        "in no table": ("items = 3", 1, "a workload has no key 'items': put it under a header [[apps]]"),
        "none at all": ("zebra = 3", 1, "its keys are apps, contexts, links"),
        "too few": ("[[apps]]\nname = 'v'\nitems = 0", 3, "items of app v cannot be 0: write 1 or more"),
        "text": ("[[apps]]\nitems = 'many'", 2, 'items of app 1 cannot be "many": write a whole number'),
        "negative": ("[[apps]]\nitem_seconds = {a10 = -1, spot = 1}", 2, "item_seconds.a10 of app 1 cannot be -1"),
        "neither": ("[[apps]]\nitem_seconds = 'x'", 2, "write item_seconds = 0.5, or a table such as item_seconds = "),
        "a kind is missing": ("[[apps]]\nitem_seconds = {a10 = 1}", 2, "has no figure for tier spot: add spot = SEC"),
        "a context": ("[[apps]]\ncontext = 'llm'", 2, "needs a context 'llm' that there is not: there are context"),
        "twice": ("[[apps]]\n[[apps]]\nitems = 1", 2, "two apps are called 'app': write another name, such as"),
        "a choice": ("[[contexts]]\norigin = 'disk'", 2, 'write "driver" or "filesystem" or "internet"'),
        "one bracket": ("[apps]\nitems = 3", 1, "apps is a list: write [[apps]] on a line of its own"),
        "a number": ("evictions = 3", 1, "evictions is a table: write [evictions] on a line of its own"),
        "no such tier": ("[evictions]\nper_hour = {b = 1}", 2, "names a tier 'b' that the site has not: there are a10"),
        "both": ("[evictions]\nper_hour = 1\ntrace = 'x'", 2, "a trace says when workers are taken, so leave one out"),
        "arrivals": ("[[apps]]\narrivals = [1, 2]", 2, "write [[seconds, items], ...], such as arrivals"),
        "arrivals and items": ("[[apps]]\nitems = 2\narrivals = [[0, 1]]", 2, "arrivals say when how many come"),
        "a fault": ("[[faults]]\nkind = 'hole'", 2, 'write "black-hole" or "slow" or "flaky-gpu" or "no-builds"'),
        "a fault's key": ("[[faults]]\nfctor = 3", 2, "a fault has no key 'fctor' (fault 1): did you mean 'factor'?"),
        "a fault's tier": ("[[faults]]\ntier = 'b'", 2, "names a tier 'b' that the site has not: there are a10, spot"),
        "how many": ("[[faults]]\nhosts = 2\nshare = 0.1", 3, "fault 1 has hosts and share: both say how many"),
        "no TOML": ("[[apps]]\nitems = many", 2, 'it is not TOML: items is text, which goes in quotes'),
    }.values(),
)  # fmt: skip
def test_mistakes_are_told_with_their_line(files, tmp_path, workload, line, says):
    with pytest.raises(WorkloadError) as caught:
        files(workload=workload)
    assert caught.value.lines[0].startswith(f"{tmp_path / 'work.toml'}, line {line}: ")
    assert says in str(caught.value)


def test_mistakes_in_changes_and_sites(files, tmp_path):
    with pytest.raises(UsageError, match=r"did you mean 'batching'\?"):
        files("batchng=fixed")
    with pytest.raises(UsageError, match="there is no batching policy 'best'"):
        files("batching=best")
    with pytest.raises(ValueError, match="there is no 'v100' in tiers: there are a10, spot"):
        files("tiers.v100.workers=3")
    with pytest.raises(UsageError, match=r"toml: an app has no key 'itms' \(app 1\): did you mean 'items'\?$"):
        files("workload.apps.app.itms=3")
    with pytest.raises(ValueError, match="needs a number to multiply"):
        files("workload.evictions.trace=2x")
    with pytest.raises(ValueError, match="is of a whole entry"):
        files("tiers.a10=3")
    for text in ("batching", "=3", "a..b=3", "workload=3"):
        with pytest.raises(ValueError, match="changes nothing: write KEY=VALUE"):
            parse_change(text)
    for text in ("batching", "batching=", "batching=a,,b"):
        with pytest.raises(ValueError, match="is no sweep: write KEY=A,B,C"):
            parse_sweep(text)
    with pytest.raises(WorkloadError, match=r"the trace nowhere.json is not there"):
        files("workload.evictions.trace=nowhere.json")
    with pytest.raises(WorkloadError, match="there is no workload"):
        load_scenario("local", tmp_path / "nowhere.toml")


@given(st.lists(st.sampled_from(["a", "'b,c'", "{x = 1, y = 2}", "[1, [2, 3]]", "4x", "5.5"]), min_size=1))
def test_sweeps_are_split_at_commas_of_their_own(values):
    assert [change.text for change in parse_sweep(f"k.l={','.join(values)}")] == [f"k.l={value}" for value in values]
    assert len(combinations([parse_sweep("a=1,2"), parse_sweep("b=1,2,3")])) == 6


def test_traces_drains_and_rates_say_who_is_there(files, tmp_path):
    (tmp_path / "spot.json").write_text(json.dumps({"metadata": {"gap_seconds": 50}, "data": [2, 9, 0, 1]}))
    scenario = files("workload.evictions.trace={spot = 'spot.json'}")
    found, _ = machines_of(scenario)
    there = {machine.name: list(machine.available(None)) for machine in found}
    assert there["a10-0"] == [(0.0, math.inf)]
    assert there["spot-0"] == [(0.0, 100.0), (150.0, 200.0)]
    assert there["spot-5"] == [(50.0, 100.0)]
    drained, _ = machines_of(files("workload.evictions.drain_from=100", "workload.evictions.drain_every=10"))
    assert [list(machine.available(None)) for machine in drained[:2]] == [[(0.0, 100.0)], [(0.0, 110.0)]]
    one_tier = play(files("workload.evictions.per_hour={spot = 60}", "workload.apps.app.items=10x"))
    assert one_tier.evicted > 10 and one_tier.lost_items > 0


def test_a_recorded_run_is_a_trace_for_another_workload(files, tmp_path):
    [first] = study([Case("", files("workload.evictions.per_hour=120"), tmp_path / "run")], [0], math.inf)
    with open(tmp_path / "run" / "events.jsonl") as lines:
        assert replay(lines) > 100, "a simulated run's log is as a live run's"
        lines.seek(0)
        assert read_history(lines).simulated, "but for what its report says of it"
    again = play(files(f"workload.evictions.trace={tmp_path / 'run'}", "batching=fixed"), until=1e5)
    assert again.done == 3000
    assert first.median("evicted") > 0 and again.evicted > 0
    copied = files(f"workload.evictions.trace={tmp_path / 'run'}", "tiers.a10.workers=9")
    names = [machine.name for machine in machines_of(copied)[0]]
    assert len(set(names)) == len(names)
    assert sum(machine.available(None).__next__()[0] < 20 for machine in machines_of(copied)[0]) >= 9


def test_files_links_and_levels(files):
    staged = "[[contexts]]\nname = 'llm'\nfiles_gb = 2\nload_seconds = 5\nload_spread = 0\n"
    tree = play(files(workload=WORKLOAD.split("[[contexts]]", maxsplit=1)[0] + staged))
    assert 2e9 <= tree.moved["driver"] < 10e9, "most have it from each other"
    assert sum(tree.moved.values()) == pytest.approx(20e9, rel=0.01)
    alone = play(files("workload.contexts.llm.origin=filesystem", "workload.contexts.llm.shared=false"))
    assert alone.moved == {"filesystem": pytest.approx(20e9, rel=0.01)}
    assert play(files("level=none", "batching={policy='fixed', size=300}")).loads >= 10


def test_arrivals_as_given_at_random_and_of_apps_in_turn(files):
    apps = "[[apps]]\nname = 'a'\narrivals = [[0, 10], [500, 10]]\nitem_seconds = 0.1\n"
    apps += "[[apps]]\nname = 'b'\nbegin = 50\nper_second = 0.5\nitems = 100\nitem_seconds = 0.1\npriority = 1\n"
    built = build(files(workload=apps), seed=4)
    assert built.items == {"a": 20, "b": 100}
    result = play(files(), seed=4)
    assert result.done == 120
    assert 500 < result.seconds < 520


def test_a_simulation_that_cannot_end_is_ended(files):
    never = files("workload.evictions.drain_from=60", "workload.evictions.drain_every=1", "workload.apps.app.items=10x")
    result = play(never, until=7200.0)
    assert (result.finished, result.seconds, result.efficiency) == (False, 7200.0, 0.0)
    assert 0 < result.done < 30000
    with pytest.raises(RuntimeError, match="items left at"):
        play(never)


def test_studies_do_not_depend_on_the_cores(files, monkeypatch):
    cases = [Case(text, files(text, "workload.evictions.per_hour=60")) for text in ("batching=fixed", "workers=2x")]
    told = []
    here = study(cases, [1, 2], math.inf, told.append)
    assert told == sorted(told) and told[-1] == 1.0
    monkeypatch.setattr("ctxflow.simulator.studies._POOL_SECONDS", 0.0)
    there = study(cases, [1, 2], math.inf)
    assert [summary.results for summary in here] == [summary.results for summary in there]
    assert here[0].spread("seconds") == abs(here[0].results[0].seconds - here[0].results[1].seconds) > 0


def test_the_bound_of_several_apps():
    found = machines(2, "fast", during(0.0)) + machines(2, "slow", during(0.0))
    presence = [(0.0, machine, 1) for machine in found]
    seconds = {"fast": 1.0, "slow": 2.0}
    one = fluid_seconds(presence, lambda machine: seconds[machine.gpu_model], 300)
    assert mixed_fluid_seconds(presence, lambda app, m: seconds[m.gpu_model], {"a": 100, "b": 200}) == one == 100.0
    # Each app is fast on one kind only: best is to keep them apart.
    apart = {("a", "fast"): 1.0, ("a", "slow"): 9.0, ("b", "fast"): 9.0, ("b", "slow"): 1.0}
    bound = mixed_fluid_seconds(presence, lambda app, m: apart[app, m.gpu_model], {"a": 100, "b": 100})
    assert bound == pytest.approx(50.0)
    assert mixed_fluid_seconds([], lambda app, m: 1.0, {"a": 1}) == math.inf


def test_hosts_are_bad_as_a_workload_says(files):
    def bad(*changes, seed=0):
        scenario = files("workload.workers_per_host=2", *changes)
        there, _ = machines_of(scenario)
        return faults_of(scenario.workload.faults, there, seed)

    holes = bad('workload.faults=[{kind = "black-hole", tier = "spot", hosts = 2, begin = 60, end = 90}]')
    assert len(holes) == 2 and {fault.where for fault in holes} < {f"spot-host-{n}" for n in range(3)}
    assert all((fault.calls, fault.begin, fault.end) == (1.0, 60, 90) for fault in holes)
    both = [{"kind": "slow", "share": 0.4, "factor": 3}, {"kind": "flaky-gpu", "hosts": 3, "calls": 0.2}]
    for seed in range(9):
        scenario = files("workload.workers_per_host=2")
        there, _ = machines_of(scenario)
        host_of = {machine.name: machine.host for machine in there}
        faults = faults_of([FaultEntry(**each) for each in both], there, seed)
        assert [fault.slower for fault in faults] == [3.0] * 2 + [1.0] * 3
        assert [fault.calls for fault in faults] == [0.0] * 2 + [0.2] * 3
        places = [host_of.get(fault.where, fault.where) for fault in faults]
        assert len(set(places)) == 5, "a host has one fault, and a GPU's is one worker's alone"
        assert all(fault.where in host_of for fault in faults[2:])
    assert bad("workload.faults=[{hosts = 1}]", seed=1) == bad("workload.faults=[{hosts = 1}]", seed=1)
    assert len({bad("workload.faults=[{hosts = 1}]", seed=seed)[0].where for seed in range(20)}) > 2
    with pytest.raises(ValueError, match="fault 1 is to be on 6 hosts, and 5 are left"):
        bad("workload.faults=[{hosts = 6}]")


def test_what_bad_hosts_do_is_in_the_figures(files):
    hole = 'workload.faults=[{kind = "black-hole", tier = "spot", hosts = 6, begin = 60}]'
    good, bad = (play(files("batching=fixed", "batching.size=20", *more)) for more in ([], [hole]))
    assert (good.raised, good.dead, good.done) == (0, 0, 3000)
    assert bad.raised > 6 and bad.done + bad.dead == 3000 and bad.finished
    poisoned = play(files("workload.apps.app.poison=100"))
    assert (poisoned.dead, poisoned.done) == (30, 2970)
    no_builds = play(files('workload.faults=[{kind = "no-builds", tier = "spot", hosts = 1}]'))
    assert no_builds.done == 3000 and no_builds.raised >= 1 and no_builds.loads == 9
