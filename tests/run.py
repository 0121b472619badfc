#!/usr/bin/env python3
"""Run ctxflow's own suite: what the Makefile's test targets call."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from suite import hunt, parts, stress, times


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    test = commands.add_parser("test", help="run parts of the suite beside each other")
    test.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts.ALL)} (default: all)")
    test.add_argument("--depth", default="test", choices=("quick", "test", "release"))
    test.add_argument("--seed", default="", help="of the order of the tests, to repeat one")
    test.add_argument("--shard", default="", metavar="K/N", help="run the K-th of N parts of about the same cost")
    test.add_argument("--testbeds", type=int, default=3, help="how many testbeds to use side by side")

    shown = commands.add_parser("times", help="show where the time of the last run went")
    shown.add_argument("--record", action="store_true", help="keep it for --shard and for the order of tests")

    hunted = commands.add_parser("hunt", help="look for examples that no run has drawn yet")
    hunted.add_argument("--hours", type=float, default=2.0)
    hunted.add_argument("--rooms", default="", help="folders of tests, such as 'policies scheduler' (default: all)")

    stressed = commands.add_parser("stress", help="run the suite again and again on a machine that is busy")
    stressed.add_argument("--runs", type=int, default=10)
    stressed.add_argument("--load", type=int, default=4, help="how many busy loops run beside it")
    stressed.add_argument("--memory", type=float, default=1.0, help="how many GB are kept in use beside it")
    stressed.add_argument("--parts", default="", help="of the suite (default: all)")
    stressed.add_argument("--seed", type=int, default=1, help="of the first run's order")

    given = parser.parse_args()
    for name in [each for each in os.environ if each.startswith("PYTHON")]:
        del os.environ[name]  # Unbuffered output, hash seeds and paths are whoever's who starts the run.
    parts.interrupt_at_signals()
    if given.command == "test":
        how = parts.How(given.depth, given.seed, given.shard, given.testbeds)
        return parts.run(given.parts or parts.ALL, how)
    if given.command == "times":
        return times.show(Path("build/times"), record=given.record)
    if given.command == "hunt":
        return hunt.run(given.hours, given.rooms.split())
    return stress.run(given.runs, given.load, given.memory, given.parts.split() or parts.ALL, given.seed)


if __name__ == "__main__":
    sys.exit(main())
