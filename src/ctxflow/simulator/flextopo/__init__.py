"""FlexTopo's experiments: preemption on clusters of 100 nodes with 8 GPUs each, and the snapshot of 41 nodes."""

from ctxflow.simulator.flextopo.reproduction import reproduce

__all__ = ["reproduce"]
