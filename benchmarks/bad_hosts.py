#!/usr/bin/env python3
"""What a bad host costs a batch job: beside the same job with that host absent, in the testbed or in the simulator.

    sudo benchmarks/bad_hosts.py --where testbed --json
    benchmarks/bad_hosts.py --where simulator --json

In the testbed, `ctxflow batch` runs 20,000 rows of 0.05 s, in batches of 10, on 12 workers of four hosts, whose
context takes 15 s to build; a run each for each scenario (bad_hosts_inside.py):

- `absent`: the bad host's three workers are not there, and nobody is bad: what the others are compared with;
- `black_hole`, `black_hole_midway`: every call on one host raises at once, from the start, or when half is done;
- `black_hole_at_first`: an ordinary error in every call there, and other jobs have the good hosts for the first 40 s;
  compared with `absent_at_first`, the same without the bad host;
- `slow`, `slow_without_peers`: rows take ten times as long there, the latter on a host whose GPU models no other has;
- `flaky`: three of ten calls raise there;
- `contexts`: the context's build fails there at once, while it goes on elsewhere;
- `jobs`: workers' jobs die there at once, since it lacks the Python environment.

In the simulator, a million such rows on 1,000 hosts of which 5 % are bad, or (`--pool testbed`) the same rows on the
same hosts as in the testbed; and one more scenario, `flaky_gpu`: a tenth of one GPU's calls raises there. Figures, by
scenario: `makespan_vs_absent`; `dead`, the rows that were given up (a good host could have answered them all) or lost;
`named_s`, from the first sign of what is wrong, and the first answer of a good host, until the bad host was named, in
the simulator until 95 % of them were, and `status_s`, until `ctxflow status` shows it; `reported`, whether `ctxflow
report` does; `named_share` of the bad hosts; `wronged`, good hosts that were named. `false_alarms` are hosts in
quarantine over some shorter runs in which all are good, but one row of 97 raises wherever it runs, and workers are
evicted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import bad_hosts_inside
import common
import inside

SCENARIOS = ("black_hole", "black_hole_midway", "slow", "contexts")
TESTBEDS = ("black_hole_at_first", "slow_without_peers", "flaky", "jobs")
"""Scenarios of the testbed alone."""
Run = Callable[[str, int], dict[str, Any]]
"""Plays a scenario with a seed; gives its seconds, dead, lost, quarantined, and the hosts that were bad."""


# --- in the testbed


def in_testbed(rows: int) -> Run:
    """Plays scenarios there."""

    def play(scenario: str, seed: int) -> dict[str, Any]:
        program = f"{inside.CHECKOUT}/benchmarks/bad_hosts_inside.py"
        count = min(rows, 3000) if scenario == "alarms" else rows
        words = inside.command("python", program, scenario, "--rows", str(count), "--seed", str(seed))
        with _no_python(bad_hosts_inside.BAD) if scenario == "jobs" else contextlib.nullcontext():
            ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found

    return play


@contextlib.contextmanager
def _no_python(host: str) -> Iterator[None]:
    """Hide the Python environment on a host."""
    words = [str(inside.TESTBED / "run"), "--user", "root", "--host", host]
    subprocess.run([*words, "mount", "-t", "tmpfs", "none", "/opt/ctxflow"], check=True)
    try:
        yield
    finally:
        subprocess.run([*words, "umount", "-l", "/opt/ctxflow"], check=True)


# --- in the simulator


KINDS = {
    "black_hole": "black-hole", "black_hole_midway": "black-hole", "slow": "slow", "contexts": "no-builds",
    "flaky_gpu": "flaky-gpu",
}  # fmt: skip
ROW_SECONDS, BATCH, BUILD_SECONDS = 0.05, 10, 15.0


class Quarantines:
    """Listens to a simulation: when the first sign of a bad host came, and when hosts were put in quarantine."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.signs: dict[str, float] = {}
        self.named: dict[str, float] = {}
        self._hosts: dict[str, str] = {}

    def listen(self, event: Any, commands: Sequence[Any]) -> None:
        """Take note of an event and what followed."""
        kind = type(event).__name__
        if kind == "WorkerJoined":
            self._hosts[event.worker.id] = event.worker.host
        elif kind in ("BatchFailed", "ContextFailed", "BatchFinished"):
            host = self._hosts.get(event.worker, "")
            if host in self.bad:
                self.signs.setdefault(host, event.time)
        for command in commands:
            if type(command).__name__ == "Quarantine":
                self.named.setdefault(command.host, event.time)


def in_simulator(hosts: int, rows: int) -> Run:
    """Plays scenarios on so many hosts."""
    from ctxflow.simulator.scenario import Scenario
    from ctxflow.simulator.studies import build, run
    from ctxflow.simulator.workload_file import WorkloadFile
    from ctxflow.sites import Site

    def play(scenario: str, seed: int) -> dict[str, Any]:
        there = hosts - round(0.05 * hosts) if scenario == "absent" else hosts
        items = rows // 5 if scenario == "alarms" else rows
        site = Site(engine="taskvine", tiers=[{"name": "gpu", "workers": there, "gpus": 1}])
        half = BUILD_SECONDS + rows * ROW_SECONDS / hosts / 2
        begin = half if scenario.endswith("_midway") else 0.0
        fault = {"kind": KINDS.get(scenario), "share": 0.05, "begin": begin}
        poison = bad_hosts_inside.POISONED if scenario == "alarms" else None
        workload = WorkloadFile(
            apps=[{"items": items, "item_seconds": ROW_SECONDS, "batch_size": BATCH, "poison": poison}],
            contexts=[{"load_seconds": BUILD_SECONDS}],
            faults=[fault] if scenario in KINDS else [],
            evictions={"per_hour": 120, "away_seconds": 20} if scenario == "alarms" else {},
        )
        listener = Quarantines()
        built = build(Scenario(site, workload), seed, listener.listen)
        listener.bad.update(each.where for each in built.faults)
        result = run(built)
        signs, named = listener.signs, listener.named
        quarantined = {host: when - max(begin, signs.get(host, 0.0)) for host, when in named.items()}
        return {
            "seconds": result.seconds, "dead_unearned": result.dead, "lost": result.items - result.done - result.dead,
            "quarantined": quarantined, "bad": sorted(listener.bad),
        }  # fmt: skip

    return play


MODELS = {
    "host1": ("a10", "rtx-6000", "rtx-6000"), "host2": ("titan-x", "titan-x", "a10"),
    "host3": ("1080-ti", "1080-ti", "rtx-6000-ada"), "host4": ("h100", "gtx-titan-x", "a40"),
}  # fmt: skip
"""The testbed's GPUs: most are the only ones of their model on any host."""


def like_testbed(rows: int) -> Run:
    """Plays scenarios on a pool as the testbed's, where hosts have hardly any GPU model in common."""
    from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
    from ctxflow.policies.registry import DEFAULTS
    from ctxflow.scheduler import Policies
    from ctxflow.scheduler import events as ev
    from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
    from ctxflow.simulator.pools import fault_on
    from ctxflow.simulator.simulation import tiers_of
    from ctxflow.simulator.workload_file import FaultEntry

    def play(scenario: str, seed: int) -> dict[str, Any]:
        alarms, listener = scenario == "alarms", Quarantines()
        available = pools.evicted(60.0, 5.0) if alarms else pools.during(0.0)
        machines = [
            SimulatedMachine(f"{host}-{n}", model, host=host, available=available)
            for host, models in MODELS.items()
            for n, model in enumerate(models)
            if not (scenario == "absent" and host == bad_hosts_inside.BAD)
        ]
        begin = BUILD_SECONDS + rows * ROW_SECONDS / 24 if scenario.endswith("_midway") else 0.0
        faults = []
        if scenario in KINDS:
            listener.bad.add(bad_hosts_inside.BAD)
            entry = FaultEntry.model_validate({"kind": KINDS[scenario], "begin": begin, "seconds": 0.005})
            its = [machine for machine in machines if machine.host == bad_hosts_inside.BAD]
            faults = list(fault_on(entry, bad_hosts_inside.BAD, its))
        times = GpuTimes({"": ROW_SECONDS}, 0.3, loading=Drawn(BUILD_SECONDS, 3.0), matching=Drawn(5.0, 2.0))
        poison = {"app": bad_hosts_inside.POISONED} if alarms else {}
        engine = SimulatedEngine(machines, times, seed=seed, faults=faults, poison=poison)
        apps = [ev.AppSpec("app", "app", "context", True, BATCH)]
        workload = Workload([ev.ContextSpec("context", "context", gpus=1)], apps, [(0.0, "app", rows)])
        policies = Policies.chosen(DEFAULTS)
        outcome = Simulation(engine, policies, workload, tiers_of(machines), seed=seed, listener=listener.listen).run()
        named, signs = listener.named, listener.signs
        return {
            "seconds": outcome.seconds, "dead_unearned": outcome.dead, "lost": rows - outcome.done - outcome.dead,
            "quarantined": {host: when - max(begin, signs.get(host, 0.0)) for host, when in named.items()},
            "bad": sorted(listener.bad),
        }  # fmt: skip

    return play


# --- figures


def figures_of(run: Run, scenarios: Sequence[str], rounds: int, alarms: int) -> dict[str, common.Figure]:
    """All figures; each round plays each scenario once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for scenario in dict.fromkeys([*map(_without, scenarios), *scenarios]):
            common.progress(f"bad hosts: round {number + 1} of {rounds}, {scenario}")
            found.setdefault(scenario, []).append(run(scenario, number + 1))
    figures = {
        f"{each}_s": common.figure([run["seconds"] for run in found[each]], "s", "lower")
        for each in dict.fromkeys(map(_without, scenarios))
    }
    for scenario in scenarios:
        for name, (samples, unit, better) in compared(found[scenario], found[_without(scenario)]).items():
            figures[f"{scenario}_{name}"] = common.figure(samples, unit, better)
    told = 0
    for number in range(alarms):
        common.progress(f"bad hosts: run {number + 1} of {alarms} in which none is, {told} called bad")
        told += len(run("alarms", number + 1)["quarantined"])
    if alarms:
        figures["false_alarms"] = common.figure([told], f"hosts in {alarms} runs", "lower")
    return figures


def _without(scenario: str) -> str:
    """The scenario without a bad host that one is compared with."""
    return "absent_at_first" if scenario.endswith("_at_first") else "absent"


def compared(
    runs: Sequence[Mapping[str, Any]], absent: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[list[float], str, str]]:
    """The samples of a scenario's figures."""
    told = [each["status_s"] for each in runs if each.get("status_s") is not None]
    named = [[each["quarantined"][host] for host in each["bad"] if host in each["quarantined"]] for each in runs]
    return {
        "makespan_vs_absent": (
            [one["seconds"] / other["seconds"] for one, other in zip(runs, absent, strict=True)], "times", "lower",
        ),
        "dead": ([each["dead_unearned"] + each["lost"] for each in runs], "rows", "lower"),
        **({"named_s": ([nearly_all(each) for each in named], "s", "lower")} if all(named) else {}),
        **({"status_s": (told, "s", "lower")} if len(told) == len(runs) else {}),
        **({"reported": ([each["reported"] for each in runs], "of runs", "higher")} if "reported" in runs[0] else {}),
        "named_share": (
            [len(those) / len(each["bad"]) for those, each in zip(named, runs, strict=True)], "of bad hosts", "higher",
        ),
        "wronged": ([len(set(each["quarantined"]) - set(each["bad"])) for each in runs], "hosts", "lower"),
    }  # fmt: skip


def nearly_all(seconds: Sequence[float]) -> float:
    """Until when 95 % were."""
    return seconds[0] if len(seconds) == 1 else statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a bad host costs a batch job.")
    parser.add_argument("--where", choices=("simulator", "testbed"), default="simulator")
    parser.add_argument("--scenario", action="append", help="one of them; may be given again")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--alarms", type=int, default=20, help="runs without a bad host (20)")
    parser.add_argument("--pool", choices=("large", "testbed"), default="large", help="which one is simulated")
    parser.add_argument("--hosts", type=int, default=1000, help="of the simulator")
    parser.add_argument("--rows", type=int, help="20,000, of the simulator 1,000 for each host")
    parser.add_argument("--quick", action="store_true", help="fewer rows: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.where == "testbed":
        reason = inside.why_not()
        if reason:
            inside.skip(reason)
        run, every = in_testbed(given.rows or (2_000 if given.quick else 20_000)), (*SCENARIOS, *TESTBEDS)
    elif given.pool == "testbed":
        run, every = like_testbed(given.rows or (4_000 if given.quick else 20_000)), (*SCENARIOS, "flaky_gpu")
    else:
        hosts = min(given.hosts, 100) if given.quick else given.hosts
        run, every = in_simulator(hosts, given.rows or 1000 * hosts), (*SCENARIOS, "flaky_gpu")
    scenarios = given.scenario or every
    figures = figures_of(run, scenarios, given.rounds, 2 if given.quick else given.alarms)
    common.report(
        f"bad-hosts-{given.where}" + f"-{given.pool}" * (given.pool != "large"),
        figures,
        common.versions(("parsl",)),
        given.json,
    )


if __name__ == "__main__":
    main()
