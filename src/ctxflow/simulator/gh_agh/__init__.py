"""The evaluation of GH and AGH: placements under stress, with less of everything, without a mechanism, over a day."""

from ctxflow.simulator.gh_agh.reproduction import reproduce

__all__ = ["reproduce"]
