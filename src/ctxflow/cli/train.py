"""`ctxflow train`: networks of the policies that have some; today TORTA's demand predictor and allocation policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn

from ctxflow.consoles import VisibleConsole
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.installing import how_to_install

SHIPPED = ("abilene", "polska", "gabriel", "cost2")


def train(
    policy: Annotated[str, typer.Argument(help="Which: torta.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("networks.npz"),
    topologies: Annotated[str, typer.Option(help="To train on, separated by commas.")] = ",".join(SHIPPED),
    minutes: Annotated[float, typer.Option(min=0.01, max=600.0, help="How long, on one core.")] = 8.0,
    seed: Annotated[int, typer.Option(min=0, max=100_000, help="Of all randomness.")] = 0,
) -> None:
    """Train a policy's networks on the simulation, and write them. Ctrl-C ends it early and keeps the best so far."""
    if policy != "torta":
        raise typer.BadParameter(f"there is no {policy!r} to train: it is torta")
    names = [name.strip() for name in topologies.split(",")]
    wrong = [name for name in names if name not in SHIPPED]
    if wrong:
        raise typer.BadParameter(f"there is no topology {wrong[0]!r}: choose from {', '.join(SHIPPED)}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}: make it first")
    try:
        from ctxflow.simulator.torta import training
    except ModuleNotFoundError as error:
        raise CtxflowError(f"training needs {error.name}: {how_to_install(extra='policies')}") from None
    from ctxflow.policies.routing.networks import write
    from ctxflow.simulator.torta.experiments import torta

    console = VisibleConsole(stderr=True)
    columns = (*Progress.get_default_columns(), TextColumn("eps {task.fields[eps]} s {task.fields[s]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predictor", total=1.0, eps="", s="")

        def tell(now: training.Progress) -> None:
            eps, s = ("" if math.isnan(each) else f"{each:.3f}" for each in (now.eps, now.s))
            progress.update(task, completed=now.share, description=f"episode {now.episodes}", eps=eps, s=s)

        found = training.train(names, minutes, seed, torta(None), tell=tell)
    command = f"ctxflow train torta --topologies {','.join(names)} --minutes {minutes:g} --seed {seed}"
    found.about["command"] = command
    write(found, output)
    reached = ", ".join(f"{name} {found.about[name]}" for name in ("episodes", "eps", "s") if name in found.about)
    VisibleConsole().print(
        f"{output}: {reached or 'it ended before the first episode did: these networks are untrained'}", highlight=False
    )
