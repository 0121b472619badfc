"""`ctxflow train`: networks of the policies that have some, by the experiments that are installed; today TORTA's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxflow.errors import UsageError
from ctxflow.terminal import visible_console


def train(
    policy: Annotated[str, typer.Argument(help="Which: torta.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("networks.npz"),
    topologies: Annotated[
        str, typer.Option(help="To train on, separated by commas; all unless stated.", show_default=False)
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.01, max=600.0, help="How long, on one core.")] = 8.0,
    seed: Annotated[int, typer.Option(min=0, max=100_000, help="Of all randomness.")] = 0,
) -> None:
    """Train a policy's networks on the simulation, and write them. Ctrl-C ends it early and keeps the best so far.

    The training is that of ctxflow-papers, a distribution of its own.
    """
    from rich.progress import Progress

    from ctxflow.simulator.experiments import TrainingRequest, experiment_names, find_experiment

    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}: make it first")
    training = find_experiment(policy).training
    if training is None:
        having = [name for name in experiment_names() if find_experiment(name).training is not None]
        raise typer.BadParameter(f"there is no {policy!r} to train: choose one of {', '.join(having)}")
    names = [name.strip() for name in topologies.split(",")] if topologies else list(training.names)
    wrong = [name for name in names if name not in training.names]
    if wrong:
        raise typer.BadParameter(f"there is no topology {wrong[0]!r}: choose from {', '.join(training.names)}")
    command = f"ctxflow train {policy} --topologies {','.join(names)} --minutes {minutes:g} --seed {seed}"
    console = visible_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(policy, total=1.0)

        def tell(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)

        reached = training.run(TrainingRequest(names, minutes, seed, output, command, tell))
    visible_console().print(f"{output}: {reached}", highlight=False)
