"""`ctxflow preempt`: decide a case of preemption that is given as data."""

from __future__ import annotations

import enum
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxflow.errors import counted

if TYPE_CHECKING:
    from ctxflow.policies.flextopo.cluster import Preemptor
    from ctxflow.policies.flextopo.preemption import Decision


class SelectionMethod(str, enum.Enum):
    """How victims are selected."""

    standard = "standard"
    imp = "imp"
    exhaustive = "exhaustive"
    exact = "exact"


class Basis(str, enum.Enum):
    """What topology is judged on."""

    allocation = "allocation"
    victims = "victims"


def preempt(
    cluster: Annotated[
        Path,
        typer.Option(help="The nodes, what runs on them, and the preemptor, as JSON.", exists=True, dir_okay=False),
    ],
    policy: Annotated[SelectionMethod, typer.Option(help="How victims are selected.")] = SelectionMethod.exact,
    alpha: Annotated[float, typer.Option(help="What counts: 0 topology, 1 priorities.", min=0.0, max=1.0)] = 0.0,
    basis: Annotated[Basis, typer.Option(help="What topology is judged on.")] = Basis.allocation,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as JSON.")] = False,
) -> None:
    """Decide who gives way to a preemptor, in a cluster given as data (docs/preemption.md has the form).

    Exits with 1 if the preemptor fits nowhere, whoever gives way.
    """
    from ctxflow.policies.flextopo.candidates import Scoring
    from ctxflow.policies.flextopo.cluster_json import cluster_from_json
    from ctxflow.policies.flextopo.preemption import decide

    try:
        data = json.loads(cluster.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{cluster} is no JSON: {error}") from None
    nodes, preemptor = cluster_from_json(data)
    if preemptor is None:
        raise ValueError(f'{cluster} names no preemptor: add "preemptor": {{"id", "priority", "gpus", ...}}')
    started = time.perf_counter()
    decision = decide(nodes, preemptor, policy.value, Scoring(alpha, basis.value))
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps(_as_json(decision, policy, seconds), indent=2))
    else:
        print(_in_words(decision, preemptor, len(nodes)))
    if decision is None:
        raise typer.Exit(1)


def _as_json(decision: Decision | None, policy: SelectionMethod, seconds: float) -> dict[str, Any]:
    found = {"node": None} if decision is None else decision.to_json()
    return {"policy": policy.value, **found, "seconds": round(seconds, 6)}


def _in_words(decision: Decision | None, preemptor: Preemptor, nodes: int) -> str:
    if decision is None:
        wish = " aligned" if preemptor.affinity == "guaranteed" else ""
        return f"{preemptor.id} fits on none of {counted(nodes, 'node')}{wish}, whoever of lower priority gives way."
    together = {"numa": "in one NUMA node", "socket": "in one socket", "machine": "across sockets"}
    lines = [
        f"{preemptor.id} goes to {decision.node}, {together[decision.level.name.lower()]}"
        + ("." if decision.hit else f"; the hardware could hold it {together[decision.target.name.lower()]}."),
        f"  gives way    {', '.join(decision.victims) or 'nobody: there is room'}",
        f"  GPUs         {', '.join(map(str, decision.gpus)) or 'none'}",
        f"  core groups  {', '.join(map(str, decision.core_groups)) or 'none'}",
    ]
    return "\n".join(lines)
