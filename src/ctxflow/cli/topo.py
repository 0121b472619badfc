"""`ctxflow topo`: a machine's sockets, NUMA nodes, cores and GPUs, drawn, as JSON, or for its HTCondor ad."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxflow.errors import UsageError
from ctxflow.safe_files import written_whole
from ctxflow.topology import Topology, changes, from_graph, to_graph
from ctxflow.topology.drawing import draw
from ctxflow.topology.graph import read_topologies
from ctxflow.topology.machine import GROUP_SIZE, read_machine
from ctxflow.topology.machine_ads import to_classad


def topo(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    classad: Annotated[bool, typer.Option("--classad", help="Print attributes for HTCondor's machine ad.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Not this machine, but JSON, a FlexTopo resource or machine ads.", exists=True, dir_okay=False
        ),
    ] = None,
    group_size: Annotated[int, typer.Option(help="The cores of a core group.", min=1)] = GROUP_SIZE,
    state: Annotated[
        Path | None,
        typer.Option(help="Print only what has changed since the last time, which is kept in this file."),
    ] = None,
) -> None:
    """Draw a machine's topology: this machine's, or that of a file.

    What cannot be found out is said at the end, or under "problems".
    """
    if as_json and classad:
        raise typer.BadParameter("give --json or --classad, not both")
    topologies = [read_machine(group_size)] if file is None else read_topologies(file.read_text("utf-8"), str(file))
    if state is not None:
        if len(topologies) != 1:
            raise UsageError("--state is for one machine: the file has several")
        if not _news(topologies[0], state):
            return
    if as_json:
        graphs = [to_graph(each) for each in topologies]
        print(json.dumps(graphs[0] if len(graphs) == 1 else graphs, indent=2))
    elif classad:
        if len(topologies) != 1:
            raise UsageError("--classad is for one machine's ad: the file has several")
        print(to_classad(topologies[0]))
    else:
        print("\n".join(map(draw, topologies)))


def _news(topology: Topology, state: Path) -> bool:
    """Whether something is new; then it is kept, and told on stderr."""
    asker = _asker()
    kept = _kept(state)
    try:
        before = from_graph(kept["topology"]) if kept.get("asker") == asker else None
    except (KeyError, ValueError):
        before = None
    different = [] if before is None else changes(before, topology)
    for each in different:
        print(f"ctxflow: {each}", file=sys.stderr)
    if before is not None and not different:
        return False
    with written_whole(state, sync=False) as file:
        file.write(json.dumps({"asker": asker, "topology": to_graph(topology)}).encode())
    return True


def _kept(state: Path) -> dict[str, Any]:
    try:
        kept = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _asker() -> str:
    """Who asks: a startd that was started anew knows nothing, and has to be told all again."""
    try:
        with open(f"/proc/{os.getppid()}/stat", encoding="utf-8") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{os.getppid()} {started}"
