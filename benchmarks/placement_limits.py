#!/usr/bin/env python3
"""How far placements are from the optimum where throughput, budget, storage, delay or error binds, and on sites.

    benchmarks/placement_limits.py --json               100 draws for each limit, 100 sites, 60 s each for the optimum
    benchmarks/placement_limits.py --draws 12 --sites 12
    benchmarks/placement_limits.py --first 1000         other draws and sites than those of the documentation
    benchmarks/placement_limits.py --quick              3 draws for each limit, 3 sites

Backs docs/placement.md's figures beyond the paper's range. Draws are `tightened(draw(seed, shape), limit, seed)`, the
shape (3,3,3), (4,4,5) or (6,6,10) in turn; sites are those of `site_and_job(seed)`, as files that `ctxflow plan SITE
JOB` reads, with its default margins. Every answer goes through the independent checker. A gap is a cost over the
exact method's proven bound, less 1: where that is not closed in its time (`closed`), the gap is to a bound that may be
under the optimum, so `..._closed` has the gaps over the others alone.

- `unserved_sites`: sites whose plan leaves demand unserved that could be served.
- `X_seconds_20`: CPU seconds of one core at (20,20,20), the median and (`_max`) the most of five draws for each limit;
  `unserved_points_20`: the most that AGH leaves unserved there beyond `improved`, in points of all query types.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from common import single
from placement import LARGE, SHAPES, checked
from typer.testing import CliRunner

from ctxflow.cli.app import app
from ctxflow.cli.screen import native_output_aside
from ctxflow.planning.job_file import GPUS
from ctxflow_papers.gh_agh.instances import BOUND_BY, draw, tightened

METHODS = ("agh", "improved")


def draws(limit: str, seeds: Sequence[int], time_limit: float) -> dict[str, common.Figure]:
    """AGH and improved beside the exact method's bound on draws in which a limit binds."""
    over: dict[str, list[float]] = {method: [] for method in METHODS}
    closed: list[bool] = []
    for seed in seeds:
        problem = tightened(draw(seed, SHAPES[seed % len(SHAPES)]), limit, seed)
        common.progress(f"{problem.name}: {len(closed) + 1} of {len(seeds)}")
        best = checked(problem, "exact", time_limit)
        if best.bound is None:
            raise SystemExit(f"the exact method has no bound on {problem.name} after {time_limit:g} s: give it more")
        closed.append(best.proven)
        for method in METHODS:
            over[method].append(checked(problem, method).costs.total / best.bound - 1)
    return shares(over, closed, f"_{limit}")


def shares(over: dict[str, list[float]], closed: Sequence[bool], ending: str) -> dict[str, common.Figure]:
    """The mean and the largest gap of each method, over all and over what was closed, in %."""
    figures = {f"closed{ending}": single(100 * sum(closed) / len(closed), "%", "higher", len(closed))}
    for method, gaps in over.items():
        proven = [gap for gap, known in zip(gaps, closed, strict=True) if known]
        for name, values in (("", gaps), ("_closed", proven)):
            if values:
                mean = 100 * sum(values) / len(values)
                figures[f"{method}_gap_mean{name}{ending}"] = single(mean, "%", "lower", len(values))
                figures[f"{method}_gap_max{name}{ending}"] = single(100 * max(values), "%", "lower", len(values))
    return figures


def site_and_job(seed: int) -> tuple[str, str]:
    """A site of one to four tiers and a job of one to five query types over one to four models, as TOML.

    Demand is 0.1 to 1.5 times what a quarter of the site's workers would do if each took as long as an A10 takes for
    8 billion parameters, so that some of it does not fit.
    """
    chance = random.Random(seed)
    tiers = range(chance.randint(1, 4))
    workers = [chance.choice([1, 4, 10, 20, 50, 100, 300]) for _ in tiers]
    site = 'engine = "taskvine"\n' + "".join(
        f'[[tiers]]\nname = "tier-{n}"\nworkers = {workers[n]}\ngpus = 1\nprice = {chance.uniform(0.1, 4):.2f}\n'
        for n in tiers
    )
    sizes = sorted(chance.choice([0.5, 1, 1.7, 3, 8, 13]) for _ in range(chance.randint(1, 4)))
    hours = chance.choice([1, 8, 24])
    job = f"hours = {hours}\n"
    for n in range(chance.randint(1, 5)):
        prompt, answer = chance.randint(50, 2000), chance.randint(1, 400)
        rate = chance.uniform(0.1, 1.5) * sum(workers) / 4 * 3600 / (0.05 + answer * 0.004)
        job += f'[[queries]]\nname = "q{n}"\nrate = {rate:.0f}\nprompt_tokens = {prompt}\noutput_tokens = {answer}\n'
        if chance.random() < 0.5:
            job += f"max_delay = {chance.choice([10, 20, 60, 300])}\n"
        if chance.random() < 0.5:
            errors = ", ".join(f'"m{m}" = {0.3 / (1 + m) * chance.uniform(0.6, 1.4):.3f}' for m in range(len(sizes)))
            job += f"max_error = {chance.choice([0.1, 0.2, 0.3])}\nerrors = {{{errors}}}\n"
    for m, size in enumerate(sizes):
        job += (
            f'[[models]]\nname = "m{m}"\nparameters = {size}\nkv_bytes_per_token = {chance.choice([65536, 131072])}\n'
        )
    for n in tiers:
        job += f'[[tiers]]\nname = "tier-{n}"\ngpu = "NVIDIA {chance.choice(sorted(GPUS))}"\n'
    return site, job


def sites(seeds: Sequence[int], time_limit: float) -> dict[str, common.Figure]:
    """`ctxflow plan SITE JOB` of random sites beside the exact method's bound, both with the default margins."""
    over: dict[str, list[float]] = {method: [] for method in METHODS}
    closed: list[bool] = []
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            common.progress(f"site {seed}: {len(closed) + 1} of {len(seeds)}")
            files = [str(Path(folder, name)) for name in ("site.toml", "job.toml")]
            for file, text in zip(files, site_and_job(seed), strict=True):
                Path(file).write_text(text)
            best = planned(files, "exact", time_limit)
            closed.append(bool(best["proven"]))
            for method in METHODS:
                found = planned(files, method, None)
                left += method == "agh" and bool(found["could_be_served"])
                bound = best["bound"]
                over[method].append(found["costs"]["total"] / bound - 1 if bound else 0.0)
    figures = shares(over, closed, "_sites")
    figures["unserved_sites"] = single(left, "sites", "lower", len(closed))
    return figures


def planned(files: Sequence[str], method: str, time_limit: float | None) -> dict[str, Any]:
    """What `ctxflow plan SITE JOB --json` says."""
    limit = [] if time_limit is None else ["--time-limit", str(time_limit)]
    run = CliRunner().invoke(app, ["plan", *files, "--method", method, "--json", *limit])
    if run.exit_code not in (0, 3):
        raise SystemExit(f"ctxflow plan {' '.join(files)} ended with {run.exit_code}: {run.output or run.exception}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def large(seeds: Sequence[int]) -> dict[str, common.Figure]:
    """CPU seconds at (20,20,20), and what AGH leaves unserved beyond improved."""
    seconds: dict[str, list[float]] = defaultdict(list)
    more = [0.0]
    for limit in BOUND_BY:
        for seed in seeds:
            problem, found = tightened(draw(seed, LARGE), limit, seed), {}
            for method in METHODS:
                common.progress(f"{problem.name}: {method}")
                begun = time.process_time()
                found[method] = checked(problem, method)
                seconds[method].append(time.process_time() - begun)
            unserved = {method: sum(each.allocation.unserved) for method, each in found.items() if each.allocation}
            more.append(100 * (unserved["agh"] - unserved["improved"]) / LARGE[0])
    figures = {f"{method}_seconds_20": common.figure(values, "s", "lower") for method, values in seconds.items()}
    for method, values in seconds.items():
        figures[f"{method}_seconds_20_max"] = single(max(values), "s", "lower", len(values))
    figures["unserved_points_20"] = single(max(more), "points", "lower", len(more) - 1)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How far placements are from the optimum, whatever limit binds.")
    parser.add_argument("--draws", type=int, default=100, help="for each limit (100)")
    parser.add_argument("--sites", type=int, default=100, help="random sites and jobs (100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the exact method, each (60)")
    parser.add_argument("--limits", nargs="+", choices=BOUND_BY, default=BOUND_BY, help="those that bind (all)")
    parser.add_argument("--quick", action="store_true", help="3 of each: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if min(given.draws, given.sites, given.first) < 0:
        parser.error("--draws, --sites and --first are how many, and from which seed on: give 0 or more")
    count, places = (3, 3) if given.quick else (given.draws, given.sites)
    figures: dict[str, common.Figure] = {}
    with native_output_aside():
        figures |= large(range(given.first, given.first + (1 if given.quick else 5)))
        for limit in given.limits if count else ():
            figures |= draws(limit, range(given.first, given.first + count), given.time_limit)
        if places:
            figures |= sites(range(given.first, given.first + places), given.time_limit)
    common.report("placement_limits", figures, common.versions(("numpy", "highspy")), given.json)


if __name__ == "__main__":
    main()
