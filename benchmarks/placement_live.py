#!/usr/bin/env python3
"""How long a plan of a run takes, and how long calls wait while one is made beside them.

    benchmarks/placement_live.py --json
    benchmarks/placement_live.py --pairs 24 --json
    benchmarks/placement_live.py --quick               2 contexts and 20 on 3 tiers, few calls

Backs docs/placement.md's figures on `placement = "agh"`. Tiers have 4 to 300 workers, speeds and prices are drawn; each
of five draws is planned twice, the second time with other demand and the first plan in place.

- `plan_C_K`: CPU seconds of a plan for C contexts on K tiers, where they have enough workers; `plan_C_K_short`, where
  half as many again are wanted. The spread is the longest less the shortest.
- `wait_alone`, `wait_planning`: the longest that one of 300 calls took, one after the other on one embedded worker,
  without anything else and while AGH is computed all the time on another thread of the program.
- `slower`: how many times longer 500 calls take then that are sent at once.
- with `--pairs N` instead: each placement policy beside each scaling policy on N drawn sites of the simulated engine
  (`ctxflow_papers.gh_agh.live_pairs`): `PLACEMENT_SCALING_cost`, its dollars in those of the cheaper of the two alone
  (placement with `fixed` scaling, scaling with the default placement), and `_makespan`, its seconds in those of the
  faster; for each the median, the `_mean` and the `_worst`; and `_worse`, the sites on which it is worse than the
  better of the two as `PairComparison.worse` counts it, with 15 % and two periods.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time

import common

from ctxflow import ContextExecutor, context_app
from ctxflow.policies.agh import solve
from ctxflow.policies.agh.live_plan import Bounds, Made, Moment
from ctxflow.policies.agh.live_work import ContextOption, Offer, Wanted
from ctxflow_papers.gh_agh.instances import draw
from ctxflow_papers.gh_agh.live_pairs import PairComparison, compare_pairs, draw_site

CONTEXTS, TIERS = (2, 5, 10, 20), (3, 6, 10)
HOLD_HOURS, LEAST_GAIN = 1 / 6, 0.05


def moment(contexts: int, tiers: int, load: float, seed: int) -> Moment:
    """A run as it may be, that wants so many times the workers that there are."""
    drawn = random.Random(seed)
    offers = [
        Offer(f"tier{k}", drawn.choice([4, 8, 20, 50, 120, 300]), round(drawn.uniform(0.3, 4), 2)) for k in range(tiers)
    ]
    workers, wanted = sum(offer.workers for offer in offers), []
    for number in range(contexts):
        seconds = drawn.uniform(0.3, 10)
        by_tier = {offer.name: seconds * drawn.uniform(0.4, 2) for offer in offers}
        rate = load * workers * 3600 / contexts / seconds * drawn.uniform(0.3, 1.5)
        wanted.append(Wanted(f"app{number}", rate, (ContextOption(f"context{number}", by_tier, drawn.uniform(5, 90)),)))
    bounds = {offer.name: Bounds(0, offer.workers, 1, "") for offer in offers}
    return Moment(wanted, offers, bounds, {}, [], Made(), HOLD_HOURS, LEAST_GAIN)


def plan_seconds(contexts: int, tiers: int, load: float) -> list[float]:
    """CPU seconds of ten plans."""
    found = []
    for seed in range(5):
        now, drawn = moment(contexts, tiers, load, seed), random.Random(seed)
        for _ in range(2):
            begun = time.process_time()
            made = now()
            found.append(time.process_time() - begun)
            wanted = [dataclasses.replace(w, per_hour=w.per_hour * drawn.uniform(0.7, 1.4)) for w in now.wanted]
            now = dataclasses.replace(now, wanted=wanted, before=made)
    return found


@context_app
def same(value: int) -> int:
    """A call that does nothing."""
    return value


def calls(count: int) -> tuple[float, float]:
    """The longest of 300 calls one after the other, and seconds for 500 at once."""
    waits = []
    for number in range(count):
        begun = time.perf_counter()
        same(number).result()
        waits.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for future in [same(number) for number in range(500)]:
        future.result()
    return max(waits), time.perf_counter() - begun


def beside(rounds: int, count: int) -> dict[str, common.Figure]:
    """Calls with and without plans made beside them."""
    waits: dict[str, list[float]] = {"alone": [], "planning": []}
    slower = []
    with ContextExecutor(workers=1):
        calls(20)
        for number in range(rounds):
            common.progress(f"calls beside plans, {number + 1} of {rounds}")
            alone, many = calls(count)
            over = threading.Event()
            planner = threading.Thread(target=plan_until, args=(over,))
            planner.start()
            planning, many_planning = calls(count)
            over.set()
            planner.join()
            waits["alone"].append(1000 * alone)
            waits["planning"].append(1000 * planning)
            slower.append(many_planning / many)
    figures = {f"wait_{name}": common.figure(values, "ms", "lower") for name, values in waits.items()}
    return figures | {"slower": common.figure(slower, "times", "lower")}


def plan_until(over: threading.Event) -> None:
    """Make plans all the time."""
    problem = draw(3)
    while not over.is_set():
        solve(problem, "agh")


def pair_figures(sites: int) -> dict[str, common.Figure]:
    """Every pair on so many drawn sites."""
    found: dict[tuple[str, str], list[PairComparison]] = {}
    for seed in range(sites):
        common.progress(f"pairs of placement and scaling, site {seed + 1} of {sites}")
        for pair, each in compare_pairs(draw_site(seed)).items():
            found.setdefault(pair, []).append(each)
    figures = {}
    for (placement, scaling), those in found.items():
        name = f"{placement}_{scaling}"
        for what, values in (
            ("cost", [each.cost for each in those]),
            ("makespan", [each.makespan for each in those]),
        ):
            figures[f"{name}_{what}"] = common.figure(values, "times", "lower")
            figures[f"{name}_{what}_mean"] = common.figure([statistics.fmean(values)], "times", "lower")
            figures[f"{name}_{what}_worst"] = common.figure([max(values)], "times", "lower")
        worse = sum(bool(each.worse(0.15, 600.0)) for each in those)
        figures[f"{name}_worse"] = common.figure([worse], "sites", "lower")
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long a run's plans take, and calls beside them.")
    parser.add_argument("--rounds", type=int, default=5, help="of calls beside plans (5)")
    parser.add_argument("--pairs", type=int, metavar="SITES", help="placement beside scaling, on so many drawn sites")
    parser.add_argument("--quick", action="store_true", help="few sizes and calls: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is how often it is measured: give 1 or more")
    if given.pairs is not None:
        if given.pairs < 1:
            parser.error("--pairs is the number of sites: give 1 or more")
        common.report("placement_live", pair_figures(given.pairs), common.versions(("numpy",)), given.json)
        return
    figures = {}
    for contexts in (2, 20) if given.quick else CONTEXTS:
        for tiers in TIERS[:1] if given.quick else TIERS:
            for ending, load in (("", 0.5), ("_short", 1.5)):
                common.progress(f"plans for {contexts} contexts on {tiers} tiers{ending}")
                seconds = plan_seconds(contexts, tiers, load)
                figures[f"plan_{contexts}_{tiers}{ending}"] = common.figure(seconds, "s", "lower")
    figures |= beside(1 if given.quick else given.rounds, 20 if given.quick else 300)
    common.report("placement_live", figures, common.versions(("numpy",)), given.json)


if __name__ == "__main__":
    main()
