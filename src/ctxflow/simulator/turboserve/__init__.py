"""The evaluation of TurboServe: traces of sessions, served with and without migration and autoscaling."""

from ctxflow.simulator.turboserve.reproduction import reproduce

__all__ = ["reproduce"]
