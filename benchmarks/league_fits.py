#!/usr/bin/env python3
"""Fit the league's generators to public traces, and print the parameters: what src/ctxflow/league/fits.json holds.

    benchmarks/league_fits.py DATA > src/ctxflow/league/fits.json

DATA is a folder with `azure/AzureLLMInferenceTrace2023_code.csv` (Microsoft Azure, CC BY 4.0) and `spot/*.json`
(SkyPilot's spot traces, which have no licence, so that none of them is shipped: only what is fitted to them).
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

AZURE = "azure/AzureLLMInferenceTrace2023_code.csv"
BIN = 10.0
STATES = ("none", "some", "all")


def azure(path: Path) -> dict[str, Any]:
    """Arrivals by ten seconds, and four classes of requests: prompts and answers above and below their medians."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    counts = [0] * (int((times[-1] - times[0]).total_seconds() // BIN) + 1)
    for time in times:
        counts[int((time - times[0]).total_seconds() // BIN)] += 1
    sizes = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    middle = [statistics.median(column) for column in zip(*sizes, strict=True)]
    classes = []
    for number, name in enumerate(("short-brief", "short-wordy", "long-brief", "long-wordy")):
        those = [each for each in sizes if (each[0] > middle[0], each[1] > middle[1]) == (number >= 2, number % 2 == 1)]
        classes.append(
            {
                "name": name,
                "share": round(len(those) / len(sizes), 4),
                "prompt_tokens": round(statistics.fmean(each[0] for each in those), 1),
                "answer_tokens": round(statistics.fmean(each[1] for each in those), 1),
            }
        )
    return {
        "source": f"{path.name}, github.com/Azure/AzurePublicDataset, Microsoft, CC BY 4.0: counted by {BIN:g} s",
        "seconds": BIN,
        "arrivals": counts,
        "classes": classes,
    }


def spot(paths: Sequence[Path]) -> dict[str, Any]:
    """How long all nodes, some or none of them could be had (log-normal), and what followed upon what."""
    zones = {}
    for path in paths:
        trace = json.loads(path.read_text())
        gap, counts = trace["metadata"]["gap_seconds"], trace["data"]
        most = max(counts)
        states = ["none" if count == 0 else "all" if count == most else "some" for count in counts]
        stretches = [(state, gap * len(list(those))) for state, those in itertools.groupby(states)]
        zones[path.stem.split("_")[1] + "_" + path.stem.split("_")[3]] = {
            "nodes": most,
            "states": dict(_states(stretches)),
        }
    return {"source": "fitted to traces of github.com/skypilot-org/spot-traces (no licence: none is shipped)", **zones}


def _states(stretches: Sequence[tuple[str, float]]) -> Iterator[tuple[str, Any]]:
    for state in STATES:
        logs = [math.log(seconds) for each, seconds in stretches if each == state]
        if not logs:
            continue
        after = [then for (each, _), (then, _) in itertools.pairwise(stretches) if each == state]
        yield (
            state,
            {
                "mu": round(statistics.fmean(logs), 2),
                "sigma": round(statistics.pstdev(logs), 2),
                "then": {then: round(after.count(then) / len(after), 3) for then in STATES if then in after},
            },
        )


def main() -> None:
    """Read and print."""
    data = Path(sys.argv[1])
    fits = {"azure": azure(data / AZURE), "spot": spot(sorted(data.glob("spot/*.json")))}
    print(json.dumps(fits))


if __name__ == "__main__":
    main()
