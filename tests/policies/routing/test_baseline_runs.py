"""The reactive baselines in whole runs: home first, and with `keep` on the workers that hold a call's context."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_runs import Run, machine

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

STREAMS = [
    (2.0 * n, f"a{n % 2}", 1) for n in range(200)
]  # Two apps in turn, of which four workers could do twice that.
KEEPING = [{"policy": "round-robin", "keep": True}, {"policy": "sdib", "keep": True}, "skylb"]


@pytest.mark.parametrize("routing", KEEPING, ids=str)
def test_what_is_loaded_is_kept(routing):
    machines = [machine(f"m{n}") for n in range(4)]
    kept = Run(routing, machines, STREAMS, size=1, load=8.0, regions=())
    assert len(kept.loads) <= 4, "each worker loads once, and no context changes after that"
    thrashing = Run("round-robin", machines, STREAMS, size=1, load=8.0, regions=())
    assert len(thrashing.loads) > 4 * len(kept.loads)


class RunByEvent(Run):
    """A run that keeps each event's time with its commands."""

    def __init__(self, *args, **kwargs):
        self.steps = []
        super().__init__(*args, **kwargs)

    def _heard(self, event, commands):
        super()._heard(event, commands)
        self.steps.append((event.time, list(commands)))


@settings(max_examples=25, deadline=None)
@example(KEEPING[0], [(0.0, "a1", 2), (1.0, "a2", 1), (18.0, "a0", 1), (18.0, "a1", 1)], 2)  # Two events of one time.
@given(
    st.sampled_from(KEEPING),
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["a0", "a1", "a2"]), st.integers(1, 6)), min_size=1),
    st.integers(1, 4),
)
def test_no_call_loads_a_context_while_a_free_worker_holds_it(routing, arrivals, workers):
    """Looked at in the commands of one event: a load of what a free worker that got no call there had ready."""
    machines = [machine(f"m{n}") for n in range(workers)]
    run = RunByEvent(routing, machines, sorted(arrivals), contexts=3, size=1, regions=())
    assert run.outcome.done == run.outcome.items
    running: dict[str, float] = {}
    held: dict[str, str] = {}
    for time, commands in run.steps:
        for call in (c for c in commands if isinstance(c, cmd.Run)):
            running[call.worker] = time + 1.0
        free = {held.get(worker): worker for worker, until in running.items() if until < time}
        loads = [c for c in commands if isinstance(c, cmd.Load)]
        assert not [load for load in loads if free.get(load.context, load.worker) != load.worker], (time, loads, free)
        for load in loads:
            held[load.worker], running[load.worker] = load.context, time + 8.0


def test_skylb_stays_in_the_region_where_items_come_from():
    machines = [machine(f"{region}{n}", region) for region in ("campus", "north") for n in range(2)]
    run = Run("skylb", machines, STREAMS, size=1, shared=True, load=2.0, origins=("campus", "north"))
    later = {(app, run.regions[worker]) for time, worker, app in run.calls if time > 60}
    assert later == {("a0", "campus"), ("a1", "north")}


def test_what_does_not_fit_at_home_goes_to_the_nearest_region():
    near = [
        ev.RegionSpec("campus", {"north": 0.01, "south": 0.2}, home=True),
        ev.RegionSpec("north", {"campus": 0.01}), ev.RegionSpec("south", {"campus": 0.2}),
    ]  # fmt: skip
    machines = [machine(f"{region}0", region) for region in ("campus", "north", "south")]
    arrivals = [(0.0, "a0", 3)] + [(100.0 + 10 * n, "a0", 2) for n in range(10)]
    run = Run("skylb", machines, arrivals, contexts=1, size=1, load=1.0, regions=near)
    assert {run.regions[worker] for time, worker, _ in run.calls if time >= 100} == {"campus", "north"}
