"""Look for examples of properties that no run has drawn yet, for hours, room by room.

Each round runs the properties of one room of tests with new seeds, and contract suites with seeds of their own. What
is done and found is in `build/hunt/`, so that a hunt that was ended goes on where it was. Failing examples are kept
there too, and are tried first in the next round of their room.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.depth import VARIABLE as DEPTH

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "hunt"
SEEDS_A_ROUND = 12
_LEAST_SECONDS = 60.0
"""What is left at least when another round begins."""


def run(hours: float, rooms: Sequence[str]) -> int:
    """Hunt for some hours; return 1 if anything was found."""
    STATE.mkdir(parents=True, exist_ok=True)
    chosen = [room for room in _rooms() if not rooms or room.rsplit("/")[-1] in rooms or room in rooms]
    if not chosen:
        print(f"No such rooms: choose of {', '.join(_rooms())}.")
        return 2
    until = time.monotonic() + hours * 3600
    done: dict[str, int] = json.loads(_read("rounds.json") or "{}")
    found: dict[str, Any] = {}
    try:
        while (left := until - time.monotonic()) > _LEAST_SECONDS:
            room = min(chosen, key=lambda each: done.get(each, 0))
            number = done.get(room, 0) + 1
            print(f"{left / 60:6.0f} min left; round {number} of {room}", flush=True)
            new = _round(room, number, left)
            for test in new:
                print(f"           found {test}", flush=True)
            found |= new
            done[room] = number
            (STATE / "rounds.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
    except KeyboardInterrupt:
        print("Interrupted: the next hunt goes on from here.")
    for test, how in found.items():
        print(f"\nFOUND {test}\n{json.dumps(how, indent=1)}")
    print(f"{len(found)} tests failed in this hunt; all finds are in {STATE / 'finds.jsonl'}.")
    return int(bool(found))


def _rooms() -> list[str]:
    folders = sorted(each for each in (ROOT / "tests").iterdir() if each.is_dir() and any(each.rglob("test_*.py")))
    left_out = {"cluster", "engines", "suite"}
    return [f"tests/{each.name}" for each in folders if each.name not in left_out] + ["tests", "papers/tests"]


def _read(name: str) -> str:
    file = STATE / name
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _round(room: str, number: int, limit: float) -> Mapping[str, Any]:
    """Run the properties of a room once; return those that failed, with what is needed to repeat it."""
    report = STATE / "round.xml"
    report.unlink(missing_ok=True)
    tests = [room] if room != "tests" else sorted(map(str, (ROOT / "tests").glob("test_*.py")))
    words = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", f"--junitxml={report}"]
    words += ["-m", "hypothesis or seeded", f"--hypothesis-seed={number}", *tests]
    first = SEEDS_A_ROUND * number
    environment = {**os.environ, DEPTH: "hunt", "CTXFLOW_CONTRACT_SEEDS": f"{first}:{first + SEEDS_A_ROUND}"}
    with (STATE / "round.log").open("wb") as log:
        try:
            subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {}
    found = {name: {"round": number, "room": room, "said": said} for name, said in failures(report).items()}
    with (STATE / "finds.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"test": name, **how}) + "\n" for name, how in found.items())
    return found


def failures(report: Path) -> dict[str, str]:
    """Return which tests of a junit file failed, and the last lines of what each said."""
    if not report.exists():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in [*case.findall("failure"), *case.findall("error")]:
            text = re.sub(r"\n{2,}", "\n", f"{problem.get('message')}\n{problem.text}")
            found[f"{case.get('classname')}::{case.get('name')}"] = text[-4000:]
    return found
