"""Measure how strong the tests are: plant faults in ctxflow, one at a time, and see which of them the tests find.

    python tests/faults/plant.py draw --seed 1 --count 140 > faults.json
    python tests/faults/plant.py map --out build/faults
    python tests/faults/plant.py run faults.json --map build/faults --out results.json
    python tests/faults/plant.py compare before.json after.json

draw     chooses faults by seed, as many from each room, spread over the operators, at most one in a function.
map      runs the tests once, and records which test reaches which code, library processes and programs included.
run      plants each fault in a copy of the tree and runs the tests that reach it, nearest and cheapest first, until one
         fails; it prints what share was found, and the faults that were not as diffs, for a person to judge.
show     prints the same of results that are there.
compare  says what share of the same faults two runs found, and which faults they differ in.

To compare two commits, draw once, and map and run in each with --tree CHECKOUT: faults are found again by function and
digest, and those whose function has changed are left out of the comparison. Map and run can be interrupted; the same
command goes on. With a map of some tests, `run` uses those only, and says which; with --again it gives what was not
found another try once more are mapped. Tests of clusters and real engines are left out unless map is told --with them.
CTXFLOW_TEST_DEPTH is heeded, for both map and run.

Tests and faults run in namespaces of their own, where nothing but a temporary folder can be written and no process
outside can be seen, since a fault may delete or kill. This takes root on Linux. A fault that no test reaches counts as
not found. One that changes nothing is judged so by a person, by "equivalent": "why" in its result: it counts no more.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fault_operators import OPERATORS, Change, Unit, units
from fault_reach import Probes, attaching, instrument
from fault_session import Order, packed, unpacked

HERE = Path(__file__).resolve().parent
ROOMS = ("scheduler", "policies", "host", "executors", "batch", "factory", "models")
LOCAL = ("tests", "papers", "src/ctxflow")
DEAR = {"cluster": "tests/cluster", "engines": "tests/engines"}
"""Tests of a testbed and of real engines, which take too long for most faults."""

FOUND = ("failed", "hang", "memory", "broken", "died")
MISSED = ("survived", "limit", "uncovered")

_FIRST_SECONDS = 10.0
_HANG = (60.0, 10.0)
_TEST = 400.0
_COLLECTING = 300.0
_MEMORY = 8 << 30
_POLL = 0.5
_DEPTH = "CTXFLOW_TEST_DEPTH"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Fault:
    """A fault with all that it takes to find it again in another commit.

    :param file: the module's path in the tree where it was drawn; `line` and `diff` are of that tree too.
    :param unit: the qualified name of the function, or of the class or module for one of its own statements.
    :param digest: of that unit, see `fault_operators`; `ordinal` is among the operator's changes in it.
    """

    id: str
    room: str
    file: str
    unit: str
    digest: str
    operator: str
    ordinal: int
    line: int
    diff: str


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    :param status: one of `FOUND`: a test failed (twice), hung, took too much memory, could not be imported, or died; of
        `MISSED`: all tests that reach it passed, as many as the limit allows did, or none reaches it; or "gone": the
        unit is not in this tree, or has changed.
    :param test: the test that found it.
    :param tests: how many tests were run, of `reaching`.
    :param unstable: tests that failed once and passed when run again.
    :param equivalent: why the fault changes nothing, as a person judged.
    """

    fault: Fault
    status: str
    test: str = ""
    tests: int = 0
    reaching: int = 0
    seconds: float = 0.0
    unstable: list[str] | None = None
    equivalent: str = ""


@dataclass(frozen=True)
class Planted:
    """A fault found in a tree: the file it is in, the file's text with it, and the statement around it."""

    file: str
    text: str
    statement: tuple[int, int]


# Drawing, and finding again.


def sources(tree: Path, room: str) -> list[str]:
    """Return the modules of a room, as paths in the tree."""
    found = (tree / "src" / "ctxflow" / room).rglob("*.py")
    return sorted(str(path.relative_to(tree)) for path in found)


def draw(tree: Path, seed: int, count: int, rooms: Iterable[str] = ROOMS) -> list[Fault]:
    """Choose faults by seed: as many in each room, spread over the operators, no two in one function."""
    rooms = list(rooms)
    faults: list[Fault] = []
    for place, room in enumerate(rooms):
        share = count // len(rooms) + (place < count % len(rooms))
        faults += _draw_in_room(tree, random.Random(f"{seed} {room}"), share, room)
    return faults


def _draw_in_room(tree: Path, rng: random.Random, count: int, room: str) -> list[Fault]:
    by_operator: dict[str, list[tuple[str, Unit, Change]]] = defaultdict(list)
    texts = {}
    for file in sources(tree, room):
        texts[file] = (tree / file).read_text(encoding="utf-8")
        for unit in units(texts[file]):
            for change in unit.changes:
                by_operator[change.operator].append((file, unit, change))
    operators = [name for name in OPERATORS if by_operator[name]]
    for name in operators:
        rng.shuffle(by_operator[name])
    rng.shuffle(operators)
    faults: list[Fault] = []
    taken: set[tuple[str, str]] = set()
    while len(faults) < count and operators:
        operator = operators.pop(0)
        while by_operator[operator]:
            file, unit, change = by_operator[operator].pop()
            planted = change.apply(texts[file])
            if (file, unit.name) in taken or not _compiles(planted):
                continue
            taken.add((file, unit.name))
            faults.append(_fault(room, file, unit, change, texts[file], planted))
            operators.append(operator)
            break
    return faults


def _compiles(text: str) -> bool:
    try:
        compile(text, "planted", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _fault(room: str, file: str, unit: Unit, change: Change, text: str, planted: str) -> Fault:
    name = "\n".join([file, unit.name, unit.digest, change.operator, str(change.ordinal)])
    lines = difflib.unified_diff(text.splitlines(), planted.splitlines(), f"a/{file}", f"b/{file}", n=2, lineterm="")
    return Fault(
        id=hashlib.sha256(name.encode()).hexdigest()[:10],
        room=room,
        file=file,
        unit=unit.name,
        digest=unit.digest,
        operator=change.operator,
        ordinal=change.ordinal,
        line=text.encode()[: change.start].count(b"\n") + 1,
        diff="\n".join(lines),
    )


def find(fault: Fault, tree: Path) -> Planted | None:
    """Find a fault's unit in a tree, unchanged, be it in another module of its room; None if it is not there."""
    for file in sorted(sources(tree, fault.room), key=lambda each: each != fault.file):
        text = (tree / file).read_text(encoding="utf-8")
        if fault.unit.rpartition(".")[2] not in text and "<" not in fault.unit:
            continue
        for unit in units(text):
            if unit.name == fault.unit and unit.digest == fault.digest:
                for change in unit.changes:
                    if (change.operator, change.ordinal) == (fault.operator, fault.ordinal):
                        return Planted(file, change.apply(text), change.statement)
    return None


# A copy of the tree, and pytest in it.


class Interrupted(Exception):
    """Ctrl-C was typed."""


class Slot:
    """A temporary copy of a tree, in which pytest runs apart from the rest of the machine."""

    def __init__(self, tree: Path, python: str, stopped: threading.Event) -> None:
        self._python = python
        self._stopped = stopped
        self.folder = Path(tempfile.mkdtemp(prefix="ctxflow-faults-"))
        self.folder.chmod(0o755)  # Some tests run as other users.
        self.tree = self.folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=tree,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = tree / name, self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            elif source.is_file():
                shutil.copy2(source, target)
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self.tree, check=True)

    def write(self, file: str, text: str) -> None:
        """Write a module, and remove what was compiled of it: a change within a second of the same size is not seen."""
        path = self.tree / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def run(
        self, order: Order, limit: Callable[[str], float], seen: Callable[[dict[str, Any]], None]
    ) -> tuple[str, str]:
        """Run tests, and return how that ended and the test during which it did.

        It is "ended", "hang", "memory", "died", or "broken" where pytest could not collect them.

        :param limit: how many seconds a test may take.
        :param seen: is called with each line of the journal.
        """
        for name in ("tmp", "home"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        journal = Path(order.journal)
        journal.write_text("")
        order.write(self.folder / "order.json")
        inner = 'mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,bind,ro /'
        inner += ' && cd "$0/tree" && exec "$@"'
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inner]
        command += [str(self.folder), self._python, str(HERE / "fault_session.py"), str(self.folder / "order.json")]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name == _DEPTH or not name.startswith(("PYTEST", "CTXFLOW"))
        }
        environment["PYTHONPATH"] = os.pathsep.join(str(self.tree / each) for each in ("src", "papers"))
        environment |= {"TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder / "home")}
        current, since, ended = "", time.monotonic(), ""
        with (self.folder / "output").open("w") as output, journal.open(encoding="utf-8") as lines:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                partial = ""
                while True:
                    over = process.poll() is not None
                    *whole, partial = (partial + lines.read()).split("\n")
                    for line in map(json.loads, whole):
                        current, since = line.get("starts", ""), time.monotonic()
                        seen(line)
                    if over:
                        break
                    if self._stopped.is_set():
                        raise Interrupted
                    allowed = limit(current) if current else _COLLECTING
                    if time.monotonic() - since > allowed:
                        ended = "hang"
                        break
                    if memory_of_namespace(process.pid) > _MEMORY:
                        ended = "memory"
                        break
                    time.sleep(_POLL)
            finally:
                process.kill()  # And with it the namespace's first process, and so all in it.
                process.wait()
        if not ended and (current or process.returncode not in range(6)):
            ended = "died"
        # Of pytest's exit statuses, 0, 1 and 5 are of tests that passed or failed, or were none.
        return ended or ("ended" if process.returncode in (0, 1, 5) else "broken"), current

    def remove(self) -> None:
        """Delete the copy, though what was killed may not have ended yet."""
        for _ in range(20):
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                break
            time.sleep(_POLL)


def memory_of_namespace(outside: int) -> int:
    """Return the resident bytes of all processes in the PID namespace that the process `outside` made; 0 before."""
    try:
        space = Path(f"/proc/{outside}/ns/pid_for_children").readlink()
        if space == Path("/proc/self/ns/pid").readlink():
            return 0
    except OSError:
        return 0
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "ns/pid").readlink() == space:
                pages += int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _arguments(paths: Iterable[str]) -> list[str]:
    """Return pytest's arguments for some paths: one process, in order, with the same examples each time."""
    return [
        *("-q", "--no-header", "--tb=short", "-p", "no:randomly", "-p", "no:xdist", "--hypothesis-seed=0"),
        *("--doctest-modules", "--ignore=src/ctxflow/examples"),
        *paths,
    ]


# The map.


class Map:
    """Which test reaches which code of a tree, how long it takes, and how it went without a fault."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder = folder
        self.tree = tree
        self.lines: dict[str, dict[str, Any]] = {}
        if self._journal.exists():
            meta = json.loads((folder / "map.json").read_text(encoding="utf-8"))
            if meta["sources"] != self.digest:
                raise SystemExit(f"{folder} is a map of other sources than {tree} has: map again, into another folder")
            for line in self._journal.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # A line that was being written when all was killed.
                    each = json.loads(line)
                    self.lines[each["test"]] = each

    @property
    def _journal(self) -> Path:
        return self.folder / "tests.jsonl"

    @cached_property
    def digest(self) -> str:
        """Identify the sources of the rooms."""
        files = [file for room in ROOMS for file in sources(self.tree, room)]
        return hashlib.sha256(b"".join((self.tree / file).read_bytes() for file in files)).hexdigest()[:16]

    def counts(self) -> dict[str, int]:
        """Count the tests that it knows, by folder."""
        counts = Counter("/".join(name.partition("::")[0].split("/")[:2]) for name in self.lines)
        return {name: counts[name] for name in sorted(counts)}

    def instrumented(self, attach: str) -> Iterator[tuple[str, str, Probes]]:
        """Yield each module of the rooms with its text with probes."""
        first = 0
        for room in ROOMS:
            for file in sources(self.tree, room):
                text, probes = instrument((self.tree / file).read_text(encoding="utf-8"), first, attach)
                first += probes.count
                yield file, text, probes

    @cached_property
    def probes(self) -> dict[str, Probes]:
        """The probes of each module."""
        return {file: probes for file, _, probes in self.instrumented("")}

    @cached_property
    def _bits(self) -> list[tuple[str, bytes]]:
        return [(name, unpacked(line["reached"])) for name, line in self.lines.items() if line["outcome"] == "passed"]

    def reaching(self, planted: Planted) -> list[str]:
        """Return the tests that reach a fault, nearest first: those of its module, of its room, then others, by cost.

        What runs when a module is imported is reached by tests that reach any function of it, or else of its package.
        """
        module = self.probes[planted.file]
        probe = module.of_statement.get(planted.statement)
        if probe is not None:
            chosen = [probe]
        else:
            chosen = list(range(module.first, module.first + module.count))
            if not chosen:
                parent = planted.file.rpartition("/")[0] + "/"
                near = [probes for file, probes in self.probes.items() if file.startswith(parent)]
                chosen = [number for each in near for number in range(each.first, each.first + each.count)]
        wanted = [(number // 8, number % 8) for number in chosen]
        found = [name for name, bits in self._bits if any(bits[byte] >> bit & 1 for byte, bit in wanted)]
        parts = planted.file.split("/")[2:]
        own, room = f"tests/{'/'.join(parts[:-1])}/test_{parts[-1]}::", f"tests/{parts[0]}/"

        def cost(name: str) -> tuple[int, float]:
            return (not name.startswith(own)) + (not name.startswith(room)), self.lines[name]["seconds"]

        return sorted(found, key=cost)

    def record(self, paths: list[str], python: str, jobs: int) -> None:
        """Run tests in instrumented copies of the tree, and add what they reach to the map; known ones are left out."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._journal.exists():
            about = {"sources": self.digest, "commit": _commit(self.tree)}
            (self.folder / "map.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        size = sum(probes.count for probes in self.probes.values())
        lock, began = threading.Lock(), time.monotonic()
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write("\n")  # After half a line, a new one.

            def keep(line: dict[str, Any]) -> None:
                if "test" not in line:
                    return
                with lock:
                    self.lines[line["test"]] = line
                    journal.write(json.dumps(line) + "\n")
                    journal.flush()
                    if len(self.lines) % 100 == 0:
                        _say(f"{len(self.lines)} tests known after {_spell(time.monotonic() - began)}")

            def work(slot: Slot, path: str) -> None:
                array = slot.folder / "array"
                if not array.exists():
                    array.write_bytes(bytes(size))
                    attach = slot.folder / "attach.py"
                    attach.write_text(attaching(str(array), size), encoding="utf-8")
                    for file, text, _ in self.instrumented(str(attach)):
                        slot.write(file, text)
                while True:
                    order = Order(
                        _arguments([path]),
                        str(slot.folder / "journal"),
                        done=list(self.lines),
                        array=str(array),
                    )
                    ended, test = slot.run(order, lambda _: _TEST, keep)
                    if ended == "ended" or not test:
                        break
                    keep({"test": test, "outcome": ended, "seconds": 0.0})  # The others follow, in another process.
                output = (slot.folder / "output").read_text(encoding="utf-8", errors="replace").split("\n")
                _say(f"{path}: {next((line for line in reversed(output) if line.strip()), 'no output')}")

            def check(slot: Slot, name: str) -> None:
                """Run a test that failed once more without probes, which a few do not bear, such as those of sizes."""
                order = Order(_arguments([name.partition("::")[0]]), str(slot.folder / "journal"), tests=[name])
                reached = {"reached": self.lines[name].get("reached", packed(bytes(size))), "checked": True}
                slot.run(order, lambda _: _TEST, lambda line: keep({**line, **reached}))

            _side_by_side(self.tree, python, jobs, paths, work)
            lost = [name for name, line in self.lines.items() if line["outcome"] not in ("passed", "skipped")]
            _side_by_side(self.tree, python, jobs, [name for name in lost if "checked" not in self.lines[name]], check)
        for name in lost:
            if self.lines[name]["outcome"] != "passed":
                _say(f"not used, since it fails without a fault: {name}")
        seconds = sum(line["seconds"] for line in self.lines.values())
        counts = Counter(line["outcome"] for line in self.lines.values())
        _say(f"{len(self.lines)} tests, {_spell(seconds)} in all: {dict(counts)}")


# Runs.


def run_fault(fault: Fault, slot: Slot, known: Map, limit: float) -> Result:
    """Plant a fault in a slot, run the tests that reach it, and take it out again.

    :param limit: how many seconds of tests are run at most, by the time that they take without a fault.
    """
    began = time.monotonic()
    planted = find(fault, known.tree)
    if planted is None:
        return Result(fault, "gone")
    reaching = known.reaching(planted)
    if not reaching:
        return Result(fault, "uncovered")
    chosen: list[str] = []
    total = 0.0
    for name in reaching:
        total += known.lines[name]["seconds"]
        if chosen and total > limit:
            break
        chosen.append(name)
    slot.write(planted.file, planted.text)
    try:
        done, unstable = _run_until_found(chosen, slot, known)
    finally:
        slot.write(planted.file, (known.tree / planted.file).read_text(encoding="utf-8"))
    status, test, tests = done
    if status == "survived" and len(chosen) < len(reaching):
        status = "limit"
    seconds = round(time.monotonic() - began, 1)
    return Result(fault, status, test, tests, len(reaching), seconds, unstable or None)


def _run_until_found(chosen: list[str], slot: Slot, known: Map) -> tuple[tuple[str, str, int], list[str]]:
    """Run tests until one fails, and does so again: first a few seconds of them, then the rest."""
    ran: list[str] = []
    unstable: list[str] = []
    left = list(chosen)
    size = _FIRST_SECONDS
    while left:
        batch: list[str] = []
        total = 0.0
        while left and (not batch or total + known.lines[left[0]]["seconds"] <= size):
            total += known.lines[left[0]]["seconds"]
            batch.append(left.pop(0))
        size = float("inf")
        ended, test, lines = _session(batch, slot, known)
        over = {line["test"] for line in lines if "test" in line}
        ran += over
        broken = [line["broken"] for line in lines if "broken" in line]
        if ended == "ended" and (broken or not over):
            ended = "broken"  # Whose exit status is that of failed tests where the first error ends it.
        if ended != "ended":
            return (ended, test or "".join(broken[:1]), len(ran)), unstable
        failed = next((line["test"] for line in lines if line.get("outcome") == "failed"), None)
        if failed is not None:
            again, _, lines = _session([failed], slot, known)
            if again != "ended" or any(line.get("outcome") == "failed" for line in lines):
                return ("failed", failed, len(ran)), unstable
            unstable.append(failed)
            left = [name for name in batch if name not in over] + left
    return ("survived", "", len(ran)), unstable


def _session(tests: list[str], slot: Slot, known: Map) -> tuple[str, str, list[dict[str, Any]]]:
    """Run tests in a slot, and return how that ended, the test during which it did, and the journal."""
    lines: list[dict[str, Any]] = []
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    order = Order(_arguments(files), str(slot.folder / "journal"), tests=tests, first_failure=True)
    least, times = _HANG
    ended, test = slot.run(order, lambda name: max(least, times * known.lines[name]["seconds"]), lines.append)
    return ended, test, lines


def still_to_run(faults: list[Fault], results: list[Result], again: bool) -> tuple[list[Result], list[Fault]]:
    """Return the results to keep, and the faults to run: those without one and, with `again`, those not found."""
    chosen = {fault.id for fault in faults}
    kept = [
        result
        for result in results
        if not (again and result.status in MISSED and not result.equivalent and result.fault.id in chosen)
    ]
    done = {result.fault.id for result in kept}
    return kept, [fault for fault in faults if fault.id not in done]


def run(faults: list[Fault], known: Map, out: Path, python: str, jobs: int, limit: float, again: bool = False) -> None:
    """Run all faults that have no result yet, and keep each result at once.

    :param again: whether to run those again that were not found.
    """
    results, left = still_to_run(faults, load_results(out) if out.exists() else [], again)
    lock, began, count = threading.Lock(), time.monotonic(), 0

    def work(slot: Slot, fault: Fault) -> None:
        nonlocal count
        result = run_fault(fault, slot, known, limit)
        with lock:
            results.append(result)
            about = {"commit": _commit(known.tree), "limit": limit, "depth": os.environ.get(_DEPTH, "")}
            about["tests"] = known.counts()
            save_results(out, results, about)
            count += 1
            to_go = (time.monotonic() - began) / count * (len(left) - count)
            where = f"{fault.file.removeprefix('src/ctxflow/')}:{fault.line}"
            what = f"{result.status} {result.test} ({result.tests} of {result.reaching} tests, {result.seconds:.0f} s)"
            _say(f"[{count}/{len(left)}] {fault.id} {where} {fault.operator}: {what}; {_spell(to_go)} left")

    _side_by_side(known.tree, python, jobs, left, work)


def _side_by_side(tree: Path, python: str, jobs: int, todo: list[_T], work: Callable[[Slot, _T], None]) -> None:
    """Do the work in so many slots at a time; Ctrl-C ends it, and what was done stays."""
    waiting: queue.SimpleQueue[_T] = queue.SimpleQueue()
    for each in todo:
        waiting.put(each)
    stopped = threading.Event()

    def serve() -> None:
        slot = Slot(tree, python, stopped)
        try:
            while not stopped.is_set():
                work(slot, waiting.get_nowait())
        except (queue.Empty, Interrupted):
            pass
        except BaseException:
            stopped.set()
            raise
        finally:
            slot.remove()

    with ThreadPoolExecutor(jobs) as pool:
        served = [pool.submit(serve) for _ in range(min(jobs, len(todo)))]
        try:
            wait(served)  # Not Thread.join, which takes a thread to have ended where Ctrl-C ends the wait.
        except KeyboardInterrupt:
            stopped.set()
            wait(served)
            raise SystemExit("Interrupted: what was done is kept, and the same command goes on.") from None
    for future in served:
        future.result()


# Results.


def save_results(path: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Write results, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    text = {**about, "results": [asdict(result) for result in results]}
    beside.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def load_results(path: Path) -> list[Result]:
    """Read results."""
    lines = json.loads(path.read_text(encoding="utf-8"))["results"]
    return [Result(**{**line, "fault": Fault(**line["fault"])}) for line in lines]


def shares(results: Iterable[Result]) -> dict[str, tuple[int, int]]:
    """Return for each room, and for "all", how many faults were found, of those that count."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for result in results:
        if result.status in FOUND + MISSED and not result.equivalent:
            for name in (result.fault.room, "all"):
                counts[name][0] += result.status in FOUND
                counts[name][1] += 1
    return {room: (counts[room][0], counts[room][1]) for room in (*ROOMS, "all") if room in counts}


def summary(path: Path) -> str:
    """Say by which tests how many faults were found in each room, and show those that were not."""
    results = load_results(path)
    tests = json.loads(path.read_text(encoding="utf-8"))["tests"]
    lines = [f"by the tests of {', '.join(f'{name} ({count})' for name, count in tests.items())}:"]
    lines += [
        f"{room:<10} {found:>4} of {count:>4} found: {_percent(found, count)}"
        for room, (found, count) in shares(results).items()
    ]
    lines.append(f"{dict(Counter(result.status for result in results))}")
    for result in sorted(results, key=lambda each: (each.fault.file, each.fault.line)):
        if result.status in MISSED and not result.equivalent:
            about = f"{result.fault.id} {result.status}: {result.fault.operator} in {result.fault.unit}"
            lines += ["", f"# {about}, {result.tests} of {result.reaching} tests", result.fault.diff]
    return "\n".join(lines)


def compare(before: list[Result], after: list[Result]) -> str:
    """Say what share of the faults that count in both runs each found, where they differ, and what neither found."""
    pairs = {result.fault.id: result for result in before}
    both = [
        (pairs[result.fault.id], result)
        for result in after
        if result.fault.id in pairs
        and all(
            each.status in FOUND + MISSED and not each.equivalent and not pairs[result.fault.id].equivalent
            for each in (pairs[result.fault.id], result)
        )
    ]
    old, new = shares(first for first, _ in both), shares(second for _, second in both)
    lines = [f"{'room':<10} {'faults':>6} {'before':>7} {'after':>7} {'points':>7}"]
    for room, (found, count) in old.items():
        points = 100 * (new[room][0] - found) / count
        lines.append(
            f"{room:<10} {count:>6} {_percent(found, count):>7} {_percent(new[room][0], count):>7} {points:>+7.1f}"
        )
    lines.append(
        f"left out: {len(before) - len(both)} of {len(before)} before, {len(after) - len(both)} of {len(after)} after"
    )
    titles = {
        (True, False): "Found before, not after",
        (False, True): "Found after, not before",
        (False, False): "Found by neither",
    }
    for kind, title in titles.items():
        chosen = [pair for pair in both if (pair[0].status in FOUND, pair[1].status in FOUND) == kind]
        lines += ["", f"{title}: {len(chosen)}"]
        for first, second in chosen:
            fault = first.fault
            how = f"{first.status} {first.test}".strip() + " -> " + f"{second.status} {second.test}".strip()
            lines.append(f"  {fault.id} {fault.file}:{fault.line} {fault.unit} {fault.operator}: {how}")
    return "\n".join(lines)


def _percent(found: int, count: int) -> str:
    return f"{100 * found / count:.1f}%"


def _spell(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _commit(tree: Path) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stdout.strip()


# The command line.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    tree = argparse.ArgumentParser(add_help=False)
    tree.add_argument("--tree", type=Path, default=HERE.parent.parent, help="a checkout (default: this one)")
    runs = argparse.ArgumentParser(add_help=False, parents=[tree])
    runs.add_argument("-j", "--jobs", type=int, default=1, help="copies of the tree at work at a time (default: 1)")
    runs.add_argument("--python", default=sys.executable, help="a Python with what the tests need (default: this one)")

    verb = verbs.add_parser("draw", parents=[tree], help="choose faults, and print them as JSON")
    verb.add_argument("--seed", type=int, default=1)
    verb.add_argument("--count", type=int, default=140, help="of all rooms together (default: 140)")
    verb.add_argument("--rooms", type=_list(ROOMS), default=list(ROOMS), help=f"of {','.join(ROOMS)} (default: all)")

    verb = verbs.add_parser("map", parents=[runs], help="record which test reaches what")
    verb.add_argument("--out", type=Path, default=Path("build/faults"), help="a folder (default: build/faults)")
    verb.add_argument(
        "--with", dest="dear", type=_list(DEAR), default=[], metavar="KINDS", help="also cluster, engines"
    )
    verb.add_argument("--tests", nargs="+", metavar="PATH", help="these tests only (default: all that are local)")

    verb = verbs.add_parser("run", parents=[runs], help="plant faults, and run the tests that reach them")
    verb.add_argument("faults", type=Path, help="what draw printed")
    verb.add_argument("--map", type=Path, default=Path("build/faults"), help="map's folder (default: build/faults)")
    verb.add_argument("--out", type=Path, required=True, help="where the results go, and are already")
    verb.add_argument("--rooms", type=_list(ROOMS), default=list(ROOMS), help="only faults in these (default: all)")
    verb.add_argument("--again", action="store_true", help="run again what was not found, as after mapping more tests")
    verb.add_argument("--limit", type=float, default=300.0, help="seconds of tests for each fault (default: 300)")

    verb = verbs.add_parser("show", help="print shares, and the faults that were not found")
    verb.add_argument("results", type=Path)
    verb = verbs.add_parser("compare", help="print how two runs of the same faults differ")
    verb.add_argument("before", type=Path)
    verb.add_argument("after", type=Path)
    return parser


def _list(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    def parsed(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(sorted(unknown))}")
        return names

    return parsed


def _local_paths(tree: Path, dear: list[str]) -> list[str]:
    """Return the tests to map, in parts of which one is a process's work."""
    parts = [path for path in sorted((tree / "tests").iterdir()) if path.is_dir() and any(path.glob("test_*.py"))]
    names = [str(path.relative_to(tree)) for path in [*parts, *sorted((tree / "tests").glob("test_*.py"))]]
    left_out = [path for name, path in DEAR.items() if name not in dear]
    if left_out:
        _say(f"left out: {', '.join(left_out)} (see --with); what only they find will count as not found")
    return [name for name in [*names, *LOCAL[1:]] if name not in left_out]


def main(arguments: list[str] | None = None) -> None:
    """Do what was typed."""
    options = _parser().parse_args(arguments)
    if options.verb == "show":
        print(summary(options.results))
        return
    if options.verb == "compare":
        print(compare(load_results(options.before), load_results(options.after)))
        return
    tree = options.tree.resolve()
    if options.verb == "draw":
        print(json.dumps([asdict(fault) for fault in draw(tree, options.seed, options.count, options.rooms)], indent=1))
        return
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise SystemExit("Tests with faults run in namespaces of their own: this takes root on Linux.")
    if options.verb == "map":
        known = Map(options.out, tree)
        known.record(options.tests or _local_paths(tree, options.dear), options.python, options.jobs)
        return
    known = Map(options.map, tree)
    if not known.lines:
        raise SystemExit(f"There is no map in {options.map}: make one with `map --out {options.map}`")
    faults = [Fault(**line) for line in json.loads(options.faults.read_text(encoding="utf-8"))]
    chosen = [fault for fault in faults if fault.room in options.rooms]
    run(chosen, known, options.out, options.python, options.jobs, options.limit, options.again)
    if options.out.exists():
        print(summary(options.out))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # A shell's background commands start with the first ignored.
        signal.signal(number, signal.default_int_handler)
    main()
