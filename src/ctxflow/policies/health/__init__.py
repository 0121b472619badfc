"""Which hosts, workers and GPUs are bad, by what they were tried with."""

from ctxflow.policies.health.nobody import NoQuarantine
from ctxflow.policies.health.sequential import SequentialTest

__all__ = ["NoQuarantine", "SequentialTest"]
