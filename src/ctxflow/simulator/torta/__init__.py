"""The evaluation of TORTA: tasks over the regions of four topologies, beside baselines that react."""

from ctxflow.simulator.torta.reproduction import reproduce

__all__ = ["reproduce"]
