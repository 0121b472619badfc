"""The site files that people copy: each loads, and some say what the papers do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxflow.factory.run_files import Lead, worker_command
from ctxflow.sites import load_site
from ctxflow.sites.site_model import Tier

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "site-configs").glob("*.toml"))
NAMES = {
    "local",
    "gpu-server",
    "condor-campus",
    "ospool",
    "slurm-campus",
    "pbs",
    "grid-engine",
    "kubernetes",
    "testbed",
}


def test_there_is_one_for_each_kind_of_site():
    assert {path.stem for path in FILES} >= NAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_site_file_loads_and_has_its_own_name(path):
    assert load_site(path).name == path.stem


def test_the_local_file_is_the_local_site():
    assert load_site(ROOT / "site-configs" / "local.toml") == load_site("local")


def test_the_campus_is_the_paper_s():
    sys.path.insert(0, str(ROOT / "testbed"))
    try:
        from pool.gpus import MODELS
    finally:
        sys.path.remove(str(ROOT / "testbed"))
    site = load_site(ROOT / "site-configs" / "condor-campus.toml")
    condor = [tier for tier in site.tiers if tier.provider == "condor"]
    told = {tier.require_gpus: tier.workers for tier in condor}
    assert told == {f'DeviceName == "{model.name}"': model.campus for model in MODELS}
    assert {(tier.cores, tier.memory_gb, tier.disk, tier.gpus) for tier in condor} == {(2, 10, 70 * 10**9, 1)}
    assert site.slots == 1 and {tier.provider for tier in site.tiers} == {"condor", "grid-engine"}


@pytest.mark.parametrize("provider", ["slurm", "pbs", "grid-engine", "kubernetes", "local", "mine:provider"])
def test_no_disk_is_promised_where_nobody_deals_it_out(provider):
    lead = Lead("login", 9123, "ctxflow.pyz", "password")
    assert "--disk" not in worker_command(Tier(provider=provider), lead), "the worker would not start on less"
    words = worker_command(Tier(provider=provider, disk_gb=9), lead)
    assert words[words.index("--disk") + 1] == "9000"


def test_the_testbed_s_tiers_add_up_to_eight_workers():
    site = load_site(ROOT / "site-configs" / "testbed-tiers.toml")
    assert len(site.tiers) == 4 and sum(tier.workers for tier in site.tiers) == 8
