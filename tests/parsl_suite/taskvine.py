"""Parsl's own test suite, run with ctxflow's executor on the TaskVine engine; for the testbed, or any machine with
ndcctools and vine_worker.

pytest SITE-PACKAGES/parsl/tests -k "not cleannet" --config tests/parsl_suite/taskvine.py

Its tests of files count on one disk for all (`shared_fs`), which the workers here have, and on Parsl's own providers.
What goes where there is no such disk is tested in tests/executors/taskvine/test_files_of_calls.py.
"""

from parsl.config import Config
from parsl.data_provider.data_manager import default_staging
from parsl.data_provider.file_noop import NoOpFileStaging

from ctxflow import ContextExecutor
from ctxflow.executors.executor import SharedDiskStaging
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

TIER = Tier(name="here", provider="local", workers=2, cores=1, memory_gb=2, disk_gb=2, gpus=0)


def fresh_config():
    site = Site(engine="taskvine", tiers=(TIER,), taskvine={"address": "127.0.0.1"})
    others = [provider for provider in default_staging if not isinstance(provider, NoOpFileStaging)]
    return Config(executors=[ContextExecutor(site=site, storage_access=[SharedDiskStaging(), *others])])


config = fresh_config()
