"""What a machine is made of and who uses it: sockets, NUMA nodes, core groups, cores and GPUs (FlexTopo).

Read from the machine itself (machine.py), from HTCondor's machine ads (condor.py) or from JSON and Kubernetes' custom
resource (graph.py); GPUs by the names that they have elsewhere (devices.py); drawn as text (drawing.py). What does not
live here: any decision about it.
"""

from ctxflow.topology.devices import device_id, of_gpus, ordered, position, used_by
from ctxflow.topology.graph import from_graph, to_graph
from ctxflow.topology.model import Core, CoreGroup, Gpu, NumaNode, Topology, changes

__all__ = [
    "Core", "CoreGroup", "Gpu", "NumaNode", "Topology", "changes", "device_id", "from_graph", "of_gpus", "ordered",
    "position", "to_graph", "used_by",
]  # fmt: skip
