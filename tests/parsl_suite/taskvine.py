"""Parsl's own test suite, run with ctxflow's executor on the TaskVine engine; for the testbed, or any machine with
ndcctools and vine_worker.

pytest SITE-PACKAGES/parsl/tests -k "not cleannet" --config tests/parsl_suite/taskvine.py
"""

from parsl.config import Config

from ctxflow import ContextExecutor
from ctxflow.sites import Site
from ctxflow.sites.tier import Tier

TIER = Tier(name="here", provider="local", workers=2, cores=1, memory_gb=2, disk_gb=2, gpus=0)


def fresh_config():
    site = Site(engine="taskvine", tiers=(TIER,), address="127.0.0.1", keepalive_interval=1, keepalive_timeout=5)
    return Config(executors=[ContextExecutor(site=site)])


config = fresh_config()
