"""TORTA's experiments, small: the vectorised servers beside plain ones, what has to hold whatever the chance."""

import copy
import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.cli.app import main
from ctxflow.errors import CtxflowError
from ctxflow.policies.baselines import PrefixTree, replicas, spread
from ctxflow.policies.torta.macro import read
from ctxflow.policies.torta.micro import Weights, fit, match
from ctxflow.policies.torta.quantities import Recent, Servers, Tasks
from ctxflow.policies.torta.scaling import switches
from ctxflow.simulator.experiments import ExperimentRequest
from ctxflow_papers.torta import experiments, reproduction
from ctxflow_papers.torta.cyclic import in_turn
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.forecasting import Imperfect, Trained, deviation
from ctxflow_papers.torta.lanes import ABSENT, COMPUTE, MEMORY, SWITCH, Arrivals, Lanes, Step
from ctxflow_papers.torta.methods import Activation, Plan, Sdib, SkyLB, Torta, levelled, plain, poured
from ctxflow_papers.torta.rules import MEAN, Even, InTurn, KnownPrefix, Scored, Soonest
from ctxflow_papers.torta.serving import Failure, Simulation, balance, simulate
from ctxflow_papers.torta.settings import GPUS, KINDS, SLOT, UNSUITED
from ctxflow_papers.torta.sizing import Sizing, dearest, first
from ctxflow_papers.torta.world import FOOTPRINTS, KIND_OF_MODEL, MODELS, TASKS_PER_SLOT, TOPOLOGIES, rates, world

SETTINGS = settings(max_examples=40, deadline=None)
SMALL = world("abilene")


def runs(count=2, slots=10, load=0.7, seed=0):
    return [tasks_of(SMALL, load, seed + n, slots) for n in range(count)]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_is_table_1_s(name):
    place = world(name)
    assert place.regions == {"abilene": 12, "polska": 12, "gabriel": 25, "cost2": 32}[name]
    for number, gpu in enumerate(GPUS):
        assert gpu.count[0] <= (place.there & (place.gpu == number)).sum() <= gpu.count[1]
    assert np.allclose(place.latency, place.latency.T) and (place.price > 0).all()
    ways = place.latency[:, :, None] + place.latency[None, :, :]
    assert (place.latency[:, None, :] <= ways + 1e-12).all()  # No detour is shorter.
    v100 = [gpu.name for gpu in GPUS].index("V100")
    assert ((place.gpu == v100) & place.there).any(axis=1).all()
    assert rates()[v100].all()  # So every region can do every type of task.


def test_a_load_is_of_the_highest_slot():
    tasks = tasks_of(SMALL, 0.8, 3, 200)
    per_slot = np.diff(tasks.starts) / (TASKS_PER_SLOT * SMALL.there.sum())
    assert 0.6 < np.sort(per_slot)[-5:].mean() < 0.9
    again = tasks_of(SMALL, 0.8, 3, 200)
    assert (again.time == tasks.time).all() and (np.diff(tasks.time) >= 0).all()
    assert tasks.counts(SMALL.regions).sum() == len(tasks.time)


def plainly_served(lanes, tasks, rule):
    """One task after the other, on plain numbers: what `Lanes.serve` does for all regions at once."""
    free, used = lanes.free.copy(), lanes.used.copy()
    found = []
    for n in range(len(tasks.lane)):
        lane, kind, model, now = tasks.lane[n], tasks.kind[n], tasks.model[n], tasks.time[n]
        gpu = lanes.gpu[lane]
        active = lanes.fits[kind][lane] & lanes.on[lane] & lanes.there[lane]
        ready = active & (lanes.ready[lane] <= now)
        allowed = ready if ready.any() else active
        step = Step(
            np.array([now]), np.array([kind]), tasks.seconds[n : n + 1], tasks.tflops[n : n + 1], allowed[None],
            (lanes.suits[lane] == kind)[None], np.maximum(free[lane] - now, 0)[None], used[model, lane][None],
            free[lane][None], COMPUTE[gpu][None], np.array([GPUS[g].watts for g in gpu])[None] / 700.0,
            SWITCH[gpu, model][None], lanes.turn[lane : lane + 1],
        )  # fmt: skip
        server = int(rule(step)[0])
        loading = SWITCH[gpu[server], model] if used[model, lane, server] == ABSENT else 0.0
        slow = max(tasks.tflops[n] / COMPUTE[gpu[server]], 1.0) * (1 if lanes.suits[lane, server] == kind else UNSUITED)
        waiting = max(free[lane, server] - now, 0.0)
        free[lane, server] = now + waiting + loading + tasks.seconds[n] * slow
        used[model, lane, server] = free[lane, server]
        while loading and FOOTPRINTS[used[:, lane, server] > ABSENT].sum() > MEMORY[gpu[server]]:
            others = [m for m in range(MODELS) if m != model and used[m, lane, server] > ABSENT]
            used[min(others, key=lambda m: used[m, lane, server]), lane, server] = ABSENT
        found.append((server, waiting, loading, tasks.seconds[n] * slow))
    return found


@pytest.mark.parametrize("rule", [Scored(), Soonest(2, 3, 3), Even(2.0), KnownPrefix(), InTurn(1.0, True)], ids=repr)
def test_lanes_serve_as_one_task_after_the_other(rule):
    chance = np.random.default_rng(5)
    lanes = Lanes(SMALL, 2)
    lanes.free[:] = chance.uniform(-60, 60, lanes.free.shape)
    lanes.on &= chance.random(lanes.on.shape) < 0.7
    lanes.ready[chance.random(lanes.on.shape) < 0.2] = 30.0
    many = 400
    lane = np.sort(chance.integers(0, len(lanes.gpu), many))
    time = np.concatenate([np.sort(chance.uniform(0, SLOT, n)) for n in np.bincount(lane, minlength=len(lanes.gpu))])
    model = chance.integers(0, MODELS, many)
    tasks = Arrivals(
        lane, time, KIND_OF_MODEL[model], model, chance.uniform(5, 25, many), chance.uniform(30, 312, many)
    )
    expected = plainly_served(copy.deepcopy(lanes), tasks, rule)
    found = lanes.serve(tasks, rule)
    assert found.server.tolist() == [each[0] for each in expected]
    for name, number in (("waiting", 1), ("loading", 2), ("inference", 3)):
        assert getattr(found, name) == pytest.approx([each[number] for each in expected])


def a_step(seed, servers=6):
    chance = np.random.default_rng(seed)
    backlog = MEAN * chance.integers(0, 3, servers).astype(float)
    here = chance.random(servers) < 0.5
    return Step(
        np.array([100.0]), np.array([0]), np.array([15.0]), np.array([200.0]), chance.random((1, servers)) < 0.8,
        chance.random((1, servers)) < 0.5, backlog[None], np.where(here, chance.uniform(0, 100, servers), ABSENT)[None],
        np.where(backlog > 0, 100 + backlog, chance.uniform(0, 100, servers))[None],
        chance.choice([125.0, 312.0], servers)[None], chance.random((1, servers)), np.full((1, servers), 20.0),
        chance.integers(0, servers, 1),
    )  # fmt: skip


def as_servers(step, held):
    count = held.shape[0]
    one = np.ones(count)
    return Servers(
        step.compute[0], 80 * one, TASKS_PER_SLOT * one, held, 0 * one, np.full(count, 9), step.suited[0][:, None]
    )


@SETTINGS
@given(st.integers(0, 10**6))
def test_rules_are_what_the_routing_room_decides_for_one_task(seed):
    step = a_step(seed)
    if not step.allowed.any():
        return
    one, zero, allowed = np.ones(1), np.zeros(1, dtype=int), step.allowed[0]
    backlog = step.backlog[0] / MEAN
    rested = np.where(backlog > 0, 0.0, np.exp((step.free[0] - 100) / SLOT))
    servers = as_servers(step, backlog + rested)
    task = Tasks(step.tflops, 14 * one, zero, zero, one, 0 * one)
    here = np.flatnonzero(step.used[0] > ABSENT)
    weights = Weights(load=3.0)
    score = fit(task, servers, Recent(here, np.zeros(len(here), int), step.used[0][here]), 100.0, weights)
    found = Scored(weights, math.inf)(step)[0]
    expected = match(score, task, servers, 3.0, step.allowed)[0]
    total = score[0] + 3.0 * np.exp(-(backlog + rested) / TASKS_PER_SLOT)
    assert total[found] == pytest.approx(total[expected])
    places = np.where(allowed & (backlog < 2), 1, 0)
    if places.any():
        turn = int(step.turn[0])
        assert InTurn(2.0)(dataclasses.replace(step, turn=step.turn.copy()))[0] == in_turn(1, places, turn)[0][0]
        tree = PrefixTree()
        for server in here:
            tree.insert(["m"], int(server))
        chosen = replicas([["m"]], tree, backlog.astype(int), np.flatnonzero(allowed).tolist(), 2)[0]
        assert KnownPrefix(2.0)(step)[0] == chosen
        known = allowed & (step.used[0] > ABSENT) & (backlog < 2)
        idle = np.maximum(100 - step.free[0], 0.0)
        among = known if known.any() else allowed
        rows = np.flatnonzero(allowed)
        sizes = np.full(len(rows), TASKS_PER_SLOT)
        sdib = spread(one, backlog[rows], sizes, np.full(len(rows), 9), idle[rows], allowed=among[rows][None])[0]
        assert Even(2.0)(step)[0] == rows[sdib]


def test_who_starts_and_stops_is_what_the_routing_room_says():
    chance = np.random.default_rng(2)
    for wanted in range(7):
        active, idle = chance.random(6) < 0.5, chance.uniform(1, 99, 6)
        warm_up, zero = chance.uniform(60, 180, 6), np.zeros(6)
        expected = switches(wanted, active, warm_up, np.ones(6), zero, idle, patience=0.0)
        change = np.array([wanted - active.sum()])
        assert set(np.flatnonzero(first(change, ~active[None], warm_up[None])[0])) == set(expected.activate)
        assert set(np.flatnonzero(first(-change, active[None], -idle[None])[0])) == set(expected.deactivate)


@pytest.mark.parametrize("name", list(experiments.methods(None)))
def test_every_task_is_served_once_and_runs_do_not_touch_each_other(name):
    both = simulate(SMALL, runs(2), experiments.methods(None)[name])
    alone = simulate(SMALL, runs(1), experiments.methods(None)[name])
    assert both.done.all() and alone.done.all()
    for metric in ("power", "overhead", "balance", "active"):
        assert getattr(both, metric)[0, 0] == pytest.approx(getattr(alone, metric)[0, 0])
    assert (both.response > 0).all() and (both.waiting >= 0).all() and (both.power > 0).all()
    assert ((both.balance > 0) & (both.balance <= 1)).all()


def test_power_of_resting_and_working_servers():
    method = Sdib()
    served = simulate(SMALL, runs(1, 6, 0.3), method)
    watts = np.array([GPUS[g].watts for g in SMALL.gpu[SMALL.there]])
    dearest = SMALL.price[8].max() * watts.sum() * SLOT / 3.6e6
    assert (served.power[:, 0] > 0.25 * dearest * SMALL.price[8].min() / SMALL.price[8].max()).all()
    assert (served.power[:, 0] < dearest).all()


def test_a_failed_region_loses_no_task_that_others_can_take():
    region = int(SMALL.there.sum(axis=1).argmax())
    simulation = Simulation(SMALL, runs(1, 14, 0.4), experiments.torta(None), Failure(region, 5, 10, math.inf))
    for slot in range(14):
        simulation.step()
        failed = 5 <= slot < 10
        mine = simulation.lanes.on[region]
        assert mine.any() != failed  # It is started anew when it is back.
        assert simulation.servers[0, region].sum() == (0 if failed else SMALL.there[region].sum())
    assert simulation.resent.any()
    assert simulation.served.done.all()
    assert (simulation.served.waiting[simulation.resent] > 0).all()


def test_a_failed_region_that_is_back_takes_tasks_again_also_where_fewer_servers_would_do():
    region = int(SMALL.there.sum(axis=1).argmax())
    simulation = Simulation(SMALL, runs(1, 30, 0.4), experiments.torta(None), Failure(region, 18, 22, math.inf))
    for slot in range(30):
        simulation.step()
        assert simulation.lanes.on[region].any() != (18 <= slot < 22)
    assert simulation.served.done.all()


def test_more_than_all_capacity_and_nothing_at_all():
    for load in (5.0, 1e-6):
        for method in (experiments.torta(None), SkyLB(), Sdib()):
            served = simulate(SMALL, runs(1, 4, load), method)
            assert np.isfinite(served.response).all() and served.done.all()


def test_pouring_and_levelling():
    room = np.array([[[1.0], [5.0], [0.0]]])
    weight = (room > 0).astype(float)
    assert poured(np.full((1, 1, 1), 4.0), room, weight).ravel().tolist() == [1.0, 3.0, 0.0]
    assert poured(np.full((1, 1, 1), 12.0), room, weight).ravel().tolist() == pytest.approx([2.0, 10.0, 0.0])
    level = levelled(np.full((1, 1, 1), 6.0), np.array([[[4.0], [0.0], [0.0]]]), np.array([[[2.0], [2.0], [0.0]]]))
    assert level.ravel().tolist() == [1.0, 5.0, 0.0]
    assert balance(np.zeros((1, 3)), np.ones((1, 3), bool)).tolist() == [1.0]


@pytest.mark.parametrize("accuracy", [0.1, 0.5, 0.9])
def test_a_forecast_is_as_accurate_as_it_is_asked_to_be(accuracy):
    noise = np.exp(deviation(accuracy) * np.random.default_rng(0).normal(size=400_000))
    assert np.exp(-np.abs(noise - 1).mean()) == pytest.approx(accuracy, abs=0.02)
    with pytest.raises(ValueError):
        deviation(0.0)


def test_forecasts_have_their_shape_up_to_the_last_slot():
    simulation = Simulation(SMALL, runs(2, 12), experiments.torta(None))
    for _ in range(12):
        state = simulation.state()
        for forecaster in (plain, Imperfect(0.5), Trained(read())):
            found = forecaster(state, 4)
            assert found.shape == (2, 4, 12, len(KINDS)) and np.isfinite(found).all() and (found >= 0).all()
            assert (found[:, 0] == state.counts).all()
        simulation.step()


def test_nan_from_a_forecast_gives_a_valid_plan():
    def broken(state, horizon):
        found = plain(state, horizon)
        found[:, 1:] = np.nan
        return found

    for method in (Torta(None, forecaster=broken), Torta(read(), forecaster=broken)):
        served = simulate(SMALL, runs(1, 4), method)
        assert served.done.all()


def test_a_plan_s_shares():
    flows = np.zeros((1, 2, 2, 2), dtype=int)
    flows[0, 0] = [[1, 3], [0, 0]]
    assert Plan(flows, np.zeros(1)).shares(2).tolist() == [[[0.25, 0.75], [0.0, 1.0]]]


def test_starting_takes_its_time_and_counts():
    on = Activation(safety=0.0, hold=0)
    served = simulate(SMALL, runs(1, 12, 0.3), Sdib(activation=on))
    assert served.active[0, 0] < SMALL.there.sum() and served.overhead.sum() > 0


@pytest.mark.long
def test_one_number_for_all_regions_is_lowered_once_and_raised_when_demand_outgrows_it():
    def rising(place, chance, slots):
        del chance
        return np.where(np.arange(slots) < 20, 0.3, 1.0)[:, None] * place.demand

    tasks = [tasks_of(SMALL, 0.9, seed, 60, rising) for seed in range(2)]
    sized = Activation(preheats=True, sizing=Sizing())
    active = simulate(SMALL, tasks, Torta(None, rule=experiments.RULE, activation=sized)).active
    everyone = SMALL.there.sum()
    assert (active[:15] == everyone).all(), "nothing says yet how few would do"
    assert (active[19] < 0.75 * everyone).all() and (active[19] > 0.3 * everyone).all()
    assert (active[-1] > active[19]).all(), "what demand outgrew was started"


def test_of_each_group_one_server_stays():
    chance = np.random.default_rng(4)
    for _ in range(200):
        runs_, regions, servers = 2, int(chance.integers(1, 5)), int(chance.integers(1, 7))
        active = chance.random((runs_ * regions, servers)) < 0.7
        idle = active & (chance.random(active.shape) < 0.6)
        count = chance.integers(-2, active.size + 2, runs_)
        cost = chance.integers(1, 4, active.shape).astype(float)
        chosen = dearest(count, idle, cost, active.sum(axis=1))
        assert not (chosen & ~idle).any()
        stopped, there = chosen.sum(axis=1), active.sum(axis=1)
        assert (there - stopped >= np.minimum(there, 1)).all()
        most = np.minimum(idle.sum(axis=1), np.maximum(there - 1, 0)).reshape(runs_, regions).sum(axis=1)
        assert (stopped.reshape(runs_, regions).sum(axis=1) == np.clip(count, 0, most)).all()
        for lane in range(len(active)):
            left = cost[lane][idle[lane] & ~chosen[lane]]
            assert not stopped[lane] or not len(left) or cost[lane][chosen[lane]].min() >= left.max()


@pytest.mark.long
def test_the_environment_is_gymnasium_s():
    pytest.importorskip("gymnasium")
    from ctxflow_papers.torta.environment import Allocations

    environment = Allocations("abilene", (1,), (0.5,), slots=5)
    observation, _ = environment.reset(seed=3)
    assert environment.observation_space.shape == observation.shape
    with pytest.raises(ValueError, match="reset"):
        Allocations("abilene").step(observation)
    ended = np.zeros(1, bool)
    steps = 0
    while not ended.all():
        action = np.full((3, 12, 12), np.nan) if steps == 2 else environment.action_space.sample()
        observation, reward, _, ended, parts = environment.step(action)
        assert np.isfinite(observation).all() and (reward <= 0).all()
        assert set(parts) == {"aligned", "smooth", "cost"}
        steps += 1
    assert steps == 5
    first_again, _ = environment.reset(seed=3)
    second_again, _ = environment.reset(seed=3)
    assert (first_again == second_again).all()


def test_training_writes_networks_that_numpy_computes_alike(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    from ctxflow.policies.torta.macro import allocated, outputs
    from ctxflow_papers.torta import training
    from ctxflow_papers.torta.environment import Allocations

    target = tmp_path / "networks.npz"
    command = ["ctxflow", "train", "torta", "--minutes", "0.05", "--topologies", "abilene", "-o", str(target)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "networks.npz" in capsys.readouterr().out.replace("\n", "")
    networks = read(target)
    assert networks.about["topologies"] == ["abilene"] and str(networks.about["command"]).startswith("ctxflow train")
    actor = training.Actor()
    environment = Allocations("abilene", (1,), (0.5,), slots=3)
    observation, _ = environment.reset()
    features, transport, before = training.split(observation)
    with torch.no_grad():
        decided = actor(features)
        expected = training.allocated(decided, transport, before).numpy()
    trainer_networks = dataclasses.replace(
        networks,
        body=training.predictor_training.layers(actor.body),
        head=training.predictor_training.layers(actor.head),
    )
    assert environment.seen is not None
    mine = outputs(trainer_networks, environment.seen)
    assert mine == pytest.approx(decided.numpy(), abs=1e-4)
    assert allocated(mine, environment.seen) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("arguments", [["other"], ["torta", "--topologies", "mars"]])
def test_train_says_what_it_does_not_know(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ctxflow", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "there is no" in capsys.readouterr().err


@pytest.mark.long
def test_reproduce_prints_and_draws(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    small = dataclasses.replace(
        reproduction.QUICK, slots=4, surge_slots=10, failure_slots=12, tasks=(20,), condition_slots=5
    )
    monkeypatch.setattr(reproduction, "QUICK", small)
    monkeypatch.setattr(sys, "argv", ["ctxflow", "reproduce", "torta", "--quick", "--json", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    figures = json.loads(capsys.readouterr().out)["figures"]
    for name in ("abilene_torta_response", "abilene_torta_power_vs_best", "surge_ideal_waiting", "milp_20", "s"):
        assert math.isfinite(figures[name]["value"]) and figures[name]["paper"] is None
    assert {path.name for path in tmp_path.iterdir()} == {
        f"torta-figure{number}.png" for number in (2, 4, 5, 8, 9, 10, 11, 12)
    }


@pytest.mark.long
def test_without_networks_it_is_transport_and_says_so(monkeypatch):
    def none(path=None):
        raise CtxflowError("there are no trained networks")

    monkeypatch.setattr(experiments, "read", none)
    assert experiments.trained() is None
    small = dataclasses.replace(reproduction.QUICK, slots=3, surge_slots=10, failure_slots=8, tasks=(20,))
    monkeypatch.setattr(reproduction, "QUICK", small)
    assert "transport form" in reproduction.reproduce(ExperimentRequest(quick=True))["networks"].unit
