"""FlexTopo: which workers to preempt when a context needs a worker of its own, on GPUs that are close together.

`preemption` has the policies `exact`, `imp` and `standard`, and `decide`, the same decision for a cluster given as data
(docs/preemption.md).
"""
