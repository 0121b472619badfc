"""Which hosts, workers and GPUs are bad, by what they were tried with: the policy `sequential` (docs/health.md)."""

from typing import TYPE_CHECKING

from ctxflow.renamed import names_of

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__)
