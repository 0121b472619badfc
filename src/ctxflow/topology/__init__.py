"""What a machine is made of and who uses it: sockets, NUMA nodes, core groups, cores and GPUs (FlexTopo).

A topology (hardware.py) is read from the machine itself (machine.py), from HTCondor's machine ads (machine_ads.py) or
from JSON and Kubernetes' custom resource, and drawn as text (graph.py).
"""

from ctxflow.topology.graph import from_graph, to_graph
from ctxflow.topology.hardware import (
    Core,
    CoreGroup,
    Gpu,
    NumaNode,
    Topology,
    changes,
    device_id,
    of_gpus,
    ordered,
    position,
    used_by,
)

__all__ = [
    "Core", "CoreGroup", "Gpu", "NumaNode", "Topology", "changes", "device_id", "from_graph", "of_gpus", "ordered",
    "position", "to_graph", "used_by",
]  # fmt: skip
