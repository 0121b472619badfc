"""Record the simulated logs of test_recorded_logs.py anew, where other decisions are wanted.

    python tests/scheduler/record_logs.py opportunistic agh-turboserve

Remove the earlier ones by hand: a name says of which revision a log is.
"""

import gzip
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from ctxflow.executors.kept_files import EventLog
from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of

FOLDER = Path(__file__).parent / "recorded"


def opportunistic(listener):
    """4,000 items on 30 workers that are evicted after 45 s on average."""
    machines = pools.machines(30, "a10", pools.evicted(45.0, 20.0))
    times = GpuTimes({"": 0.3}, 0.5, call_overhead=Drawn(0.2), loading=Drawn(15.0, 3.0), matching=Drawn(1.0))
    context, app = ev.ContextSpec("context", "context", gpus=1), ev.AppSpec("app", "app", "context")
    return Simulation(
        SimulatedEngine(machines, times),
        Policies.chosen({"batching": "opportunistic", "scaling": "queue-proportional"}),
        Workload([context], [app], [(0.0, "app", 4000)]),
        tiers_of(machines),
        seed=1,
        listener=listener,
    )


def agh_turboserve(listener):
    """Sessions beside items that come every 20 s, on two kinds of workers that are evicted after a minute or so."""
    seconds = {"cheap": 0.12, "fast": 0.07}
    machines = [
        SimulatedMachine(f"{tier}-{n}", tier, tier, available=pools.evicted(60.0, 15.0))
        for tier, count in (("cheap", 12), ("fast", 6))
        for n in range(count)
    ]
    each = {(tier, tier): GpuTimes({"": cost}, call_overhead=Drawn(0.02)) for tier, cost in seconds.items()}
    slower = {kind: GpuTimes({"": 3 * times.item_seconds[""]}) for kind, times in each.items()}
    loads = {kind: Drawn(3.0) for kind in each}
    times = MixedTimes(
        {"talk": each, "ask": slower}, {"talker": loads, "asker": loads}, dict.fromkeys(seconds, Drawn(5.0))
    )
    contexts = [ev.ContextSpec(name, name, gpus=1) for name in ("talker", "asker")]
    apps = [
        ev.AppSpec("talk", "talk", "talker", batch=False, sessions=True, chunk_target=1.0, keep_every=4),
        ev.AppSpec("ask", "ask", "asker"),
    ]
    others = [ev.SessionOpened(0.0 if n <= 20 else 100.0, n, "talk", 10**9) for n in range(1, 36)]
    others += [ev.SessionSuspended(70.0, 3), ev.SessionResumed(100.0, 3), ev.SessionClosed(110.0, 5)]
    policies = {
        "batching": {"policy": "coalescing", "size": 4},
        "placement": {"policy": "agh", "period": 100.0},
        "scaling": {"policy": "closed-loop", "boot_seconds": 30.0},
        "sessions": "turboserve",
    }
    return Simulation(
        SimulatedEngine(machines, times, state_bytes=10**6, carry_seconds=0.05),
        Policies.chosen(policies),
        Workload(contexts, apps, [(20.0 * n, "ask", 40) for n in range(10)]),
        [ev.TierSpec("cheap", 0, 12, gpus=1, price=1.0), ev.TierSpec("fast", 0, 6, gpus=1, price=3.0)],
        others=sorted(others, key=lambda event: event.time),
        seed=3,
        listener=listener,
    )


KNOWN = {"opportunistic": (opportunistic, 1e4), "agh-turboserve": (agh_turboserve, 200.0)}


def record(name, revision):
    """Simulate a run, and write its log beside the others."""
    make, end = KNOWN[name]
    heard = []
    simulation = make(lambda *step: heard.append(step))
    simulation.run(until=end)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with closing(EventLog(str(path), first_line(simulation.scheduler, simulated=True))) as log:
            for event, commands in heard:
                log.add(event, commands)
        target = FOLDER / f"{name}-{revision}.jsonl.gz"
        target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    print(target.relative_to(FOLDER.parent))


if __name__ == "__main__":
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    for each in sys.argv[1:]:
        record(each, head.stdout.strip())
