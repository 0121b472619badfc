"""`ctxflow env`: pack an environment for workers that do not share this machine's files, look at it, try it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxflow.cli.screen import AsJson
from ctxflow.errors import CtxflowError, counted
from ctxflow.terminal import visible_console

env = typer.Typer(
    name="env",
    help="Pack the environment for workers that see neither it nor a shared filesystem.",
    no_args_is_help=True,
)
_Archive = Annotated[Path, typer.Argument(help="A packed environment.", exists=True, dir_okay=False)]


@env.command()
def pack(
    prefix: Annotated[
        Path | None, typer.Argument(help="A virtual or conda environment; by default the active one.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder that the archive goes to.")] = Path(),
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out what matches, such as 'torch/include/*'; may be given again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pack an environment into one file that unpacks and runs on any machine of the same kind.

    The file is named by a digest of what is in it: an environment that did not change is not packed again.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from ctxflow.environments.archiving import pack_environment

    began = time.monotonic()
    bar = BarColumn(bar_width=None)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), bar, DownloadColumn(), TimeRemainingColumn())
    console = visible_console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    progress.remove_task(earlier)
                tasks.clear()
                tasks[stage] = progress.add_task(stage, total=total or None)
            progress.update(tasks[stage], completed=done)

        packed = pack_environment(prefix, out, exclude or (), report)
    size, seconds = packed.path.stat().st_size, time.monotonic() - began
    if as_json:
        about = {"path": str(packed.path), "new": packed.new, "archive_bytes": size, "seconds": round(seconds, 2)}
        print(json.dumps(about | packed.manifest, indent=2))
    else:
        manifest = packed.manifest
        print(packed.path)
        done = f"Packed in {seconds:.1f} s" if packed.new else "Packed before, and kept"
        console.print(
            f"{done}: {counted(manifest['files'], 'file')}, {manifest['bytes'] / 1e6:,.0f} MB, as "
            f"{size / 1e6:,.0f} MB; for {manifest['platform']} with glibc {manifest['glibc']} or newer",
            soft_wrap=True,
        )


@env.command()
def show(archive: _Archive) -> None:
    """Print what is in a packed environment, as JSON."""
    from ctxflow.environments.opening import read_manifest

    print(json.dumps(read_manifest(archive), indent=2))


@env.command()
def check(archive: _Archive, as_json: AsJson = False) -> None:
    """Unpack an environment into a temporary folder, and start in it what a worker needs.

    Exits with 1 if it does not fit this machine or does not work.
    """
    from ctxflow.environments.opening import open_environment

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ctxflow-env-") as folder:
        with visible_console(stderr=True).status("Unpacking"):
            python = open_environment(archive, Path(folder) / "environment")
        opened = time.monotonic() - began
        program = "import cloudpickle, ctxflow; print(ctxflow.__version__)"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
        run = subprocess.run(
            [str(python), "-c", program], capture_output=True, check=False, text=True, cwd=folder, env=clean
        )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"status {run.returncode}"])[-1]
        raise CtxflowError(f"{archive} unpacks and starts, but a worker could not use it: {last}")
    if as_json:
        print(json.dumps({"ctxflow": run.stdout.strip(), "unpack_seconds": round(opened, 2)}))
    else:
        print(f"It works here: ctxflow {run.stdout.strip()} starts; unpacked in {opened:.1f} s.")
