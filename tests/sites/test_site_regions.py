"""Regions of a site file: what they say, what is wrong with them, and which one a worker is in."""

import pytest

from ctxflow.executors.taskvine.vine_workers import VineWorker
from ctxflow.host.messages import WorkerFacts
from ctxflow.sites import SiteError, load_site
from ctxflow.sites.reference import toml_lines
from ctxflow.sites.site_model import region_specs
from ctxflow.sites.site_rules import hints

SITE = """\
engine = "taskvine"
region = "campus"
[[tiers]]
name = "a10"
[[tiers]]
name = "spot"
[[regions]]
name = "campus"
tiers = ["a10"]
power_price = 0.21
[[regions]]
name = "north"
hosts = ["n*.example.org"]
latency_ms = {campus = 40}
bandwidth_mbit = {campus = 200}
"""


def loaded(tmp_path, text=SITE):
    (tmp_path / "site.toml").write_text(text)
    return load_site(tmp_path / "site.toml")


def test_the_scheduler_hears_of_them_in_seconds_and_bytes_both_ways(tmp_path):
    site = loaded(tmp_path)
    campus, north = region_specs(site.regions, site.home)
    assert (campus.home, north.home, campus.power_price, campus.tiers) == (True, False, 0.21, ("a10",))
    assert campus.latency == {"north": 0.04} and north.bandwidth == {"campus": 25e6} == {"campus": 200e6 / 8}


def test_what_is_written_out_reads_as_it_was(tmp_path):
    site = loaded(tmp_path)
    assert loaded(tmp_path, "\n".join(line for line, _ in toml_lines(site))) == site


@pytest.mark.parametrize(
    ("host", "tier", "told", "region"),
    [
        ("g1", "a10", None, "campus"),
        ("n7.example.org", "a10", None, "north"),
        ("g1", "a10", "north", "north"),
        ("g1", "a10", "mars", "campus"),
        ("g1", "spot", None, "campus"),
    ],
)
def test_a_worker_tells_its_region_else_its_machine_or_tier_does(tmp_path, host, tier, told, region):
    site = loaded(tmp_path)
    hello = WorkerFacts(host, "0", tier=tier, region=told, device=1, gpus=1, gpu_model="A10", memory=10**10)
    worker = VineWorker("w1", host, "address", 0.0)
    worker.learn(hello, site.tiers)
    assert worker.spec(hello, site).region == region


def test_without_regions_all_workers_are_in_one(tmp_path):
    site = loaded(tmp_path, 'engine = "taskvine"\n[[tiers]]\nname = "a10"\n')
    assert site.home == "default" and region_specs(site.regions, site.home) == []


MISTAKES = {
    "an unknown region": ('region = "campus"', 'region = "camp"', 2, "write one of campus, north"),
    "an unknown tier": ('["a10"]', '["a1"]', 9, "did you mean 'a10'?"),
    "a tier in two": ('hosts = ["n*.example.org"]', 'tiers = ["a10"]', 13, "leave it out of one"),
    "a name twice": ('name = "north"', 'name = "campus"', 12, "give one of them another"),
    "an unknown neighbour": ("{campus = 40}", "{camps = 40}", 14, "did you mean 'campus'?"),
    "no bandwidth": ("{campus = 200}", "{campus = 0}", 15, "write a number"),
    "an infinite latency": ("{campus = 40}", "{campus = inf}", 14, "write a number"),
    "no price": ("0.21", "inf", 10, "dollars a kWh"),
    "one host": ('["n*.example.org"]', '"n1"', 13, "write a list of texts"),
    "a latency in words": ("{campus = 40}", '{campus = "far"}', 14, "write a number for each region"),
    "an unknown key": ("power_price", "power", 10, "did you mean 'power_price'?"),
    "a negative price": ("0.21", "-1", 10, "write 0 or more"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_told_with_its_line(tmp_path, mistake):
    old, new, line, advice = MISTAKES[mistake]
    with pytest.raises(SiteError) as raised:
        loaded(tmp_path, SITE.replace(old, new))
    assert any(f"line {line}: " in each and advice in each for each in raised.value.lines), raised.value


def test_regions_are_for_clusters_and_have_a_header(tmp_path):
    with pytest.raises(SiteError, match="all on this machine, so it has no regions"):
        loaded(tmp_path, '[[regions]]\nname = "campus"\n')
    with pytest.raises(SiteError, match=r"write \[\[regions\]\] on a line of its own"):
        loaded(tmp_path, 'regions = ["campus"]\n')


def test_a_tier_that_no_region_names_is_pointed_out(tmp_path):
    assert not any("region" in hint for hint in hints(loaded(tmp_path), environment=False)), "names may tell"
    site = loaded(tmp_path, SITE.replace('hosts = ["n*.example.org"]\n', ""))
    assert any("tier spot is in no region, so its workers count as in campus" in hint for hint in hints(site, False))
