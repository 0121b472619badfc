"""`ctxflow doctor`: what is installed, which devices and engines there are, and what to do about what is not."""

from __future__ import annotations

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
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ctxflow.version import __version__

_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]bad[/]"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    :ivar state: "ok", "missing" (optional, and not there) or "bad" (something will not work).
    :ivar advice: what to do, "" if nothing.
    """

    topic: str
    name: str
    state: str
    found: str
    advice: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine: what is installed, which devices and engines there are, and what to do next.

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
    console = Console()
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
        console.print(f"[red]{len(bad)} thing(s) will not work[/]: {', '.join(finding.name for finding in bad)}")
    else:
        console.print("[green]Ready.[/] Try [bold]ctxflow demo[/].")


def examine() -> Iterable[Finding]:
    """Everything that is looked at, in the order it is shown."""
    yield from _machine()
    yield from _packages()
    yield from _devices()
    yield from _engines()


def _machine() -> Iterable[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 10)
    yield Finding("Machine", "Python", "ok" if good else "bad", f"{version} at {sys.executable}",
                  "" if good else "ctxflow needs Python 3.10 or newer")  # fmt: skip
    yield Finding("Machine", "ctxflow", "ok", __version__)
    memory = psutil.virtual_memory()
    yield Finding("Machine", "cores", "ok", f"{os.cpu_count()}")
    yield Finding("Machine", "memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free")
    scratch = tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    enough = free > 1e9
    yield Finding("Machine", "scratch disk", "ok" if enough else "bad", f"{free / 1e9:.1f} GB free in {scratch}",
                  "" if enough else "free some, or set the site's scratch (or TMPDIR) to a larger disk")  # fmt: skip
    linux = sys.platform == "linux"
    yield Finding("Machine", "system", "ok" if linux else "bad", platform.platform(),
                  "" if linux else "workers need Linux")  # fmt: skip


_PACKAGES = [
    ("parsl", True, ""),
    ("cloudpickle", True, ""),
    ("numpy", True, ""),
    ("torch", False, "for model contexts: pip install 'ctxflow[transformers]'"),
    ("transformers", False, "for model contexts: pip install 'ctxflow[transformers]'"),
    ("vllm", False, "for fast generation on GPUs: pip install 'ctxflow[vllm]'"),
    ("pyarrow", False, "for Parquet and datasets in `ctxflow batch`: pip install 'ctxflow[batch]'"),
    ("jinja2", False, "for templates in `ctxflow batch`: pip install 'ctxflow[batch]'"),
    ("scipy", False, "for the placement and routing policies: pip install 'ctxflow[policies]'"),
    ("matplotlib", False, "for plots: pip install 'ctxflow[report]'"),
    ("htcondor", False, "to acquire workers from HTCondor: pip install 'ctxflow[htcondor]'"),
    ("prometheus-client", False, "for the metrics of `ctxflow factory`: pip install 'ctxflow[factory]'"),
]


def _packages() -> Iterable[Finding]:
    for name, needed, advice in _PACKAGES:
        try:
            yield Finding("Packages", name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            state = "bad" if needed else "missing"
            yield Finding("Packages", name, state, "not installed", advice or "reinstall ctxflow: pip install ctxflow")


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
        lacking = " and ".join(
            what for what, there in (("vine_worker", vine_worker), ("the Python bindings", bindings)) if not there
        )
        advice = "for clusters: conda install -c conda-forge ndcctools (Debian: coop-computing-tools)"
        yield Finding("Engines", "taskvine", "missing", f"{lacking} not found", advice)
    condor = shutil.which("condor_submit")
    yield Finding("Engines", "HTCondor", "ok" if condor else "missing", condor or "condor_submit not found",
                  "" if condor else "run the factory on a machine that may submit jobs")  # fmt: skip


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
            return Finding("Engines", "embedded", "ok", "a worker started and answered")
        return Finding("Engines", "embedded", "bad", f"a worker answered {answer!r} instead of 36", "report this")
    except Exception as error:
        return Finding("Engines", "embedded", "bad", f"{type(error).__name__}: {error}", "see the message")
