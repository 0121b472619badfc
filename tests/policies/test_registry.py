"""Policies by name, also from packages outside."""

import sys

import pytest

from ctxflow import ContextExecutor, batch_app
from ctxflow.policies.registry import FAMILIES, make, names
from ctxflow.policies.simple import ContextAffinity, Fixed

MODULE = """
from ctxflow.policies.simple import ContextAffinity

class Tracing(ContextAffinity):
    asked = 0

    def __init__(self, colour="red"):
        self.colour = colour

    def assign(self, view, ready):
        Tracing.asked += 1
        return super().assign(view, ready)

class Pairs:
    linger = 0.0

    def size(self, view, app, worker):
        return 2

    def duplicate(self, view, worker):
        return None

class Nothing:
    pass

COUNT = 3
"""
ENTRIES = """[ctxflow.policies]
routing.tracing = acme_policies:Tracing
batching.pairs = acme_policies:Pairs
scaling.nothing = acme_policies:Nothing
scaling.count = acme_policies:COUNT
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A package as pip leaves it in site-packages."""
    (tmp_path / "acme_policies.py").write_text(MODULE)
    info = tmp_path / "acme_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_policies", None)


def test_a_policy_of_another_package_runs_by_its_name(acme):
    (acme / "site.toml").write_text(
        'workers = 2\nbatching = "pairs"\nrouting = {policy = "tracing", colour = "blue"}\n'
    )
    executor = ContextExecutor(site=str(acme / "site.toml"))
    executor.run_dir = str(acme / "run")

    @batch_app
    def size(numbers):
        return [len(numbers)] * len(numbers)

    with executor:
        assert list(size.map(range(8))) == [2] * 8
    module = sys.modules["acme_policies"]
    assert module.Tracing.asked > 0 and executor._policies.routing.colour == "blue"


def test_what_others_offer_is_listed_and_checked(acme):
    assert {"context-affinity", "tracing"} < set(names("routing"))
    assert "pairs" in names("batching") and "pairs" not in names("routing")
    with pytest.raises(ValueError, match="choose one of coalescing, fixed, opportunistic, pairs"):
        make("batching", "triples")
    with pytest.raises(ValueError, match=r"the scaling policy cannot be .*Nothing object.* which has no 'target'"):
        make("scaling", "nothing")


def test_objects_are_taken_as_they_are():
    policy = Fixed(3)
    assert make("batching", policy) is policy
    with pytest.raises(ValueError, match="the batching policy cannot be the class Fixed: give a name"):
        make("batching", Fixed)
    with pytest.raises(ValueError, match="which has no 'size'"):
        make("batching", ContextAffinity())


def test_every_family_has_a_default_that_can_be_made():
    assert set(FAMILIES) == {"routing", "batching", "placement", "preemption", "scaling", "health", "sessions"}
    for family in FAMILIES:
        for name in names(family):
            assert make(family, name)


def test_an_entry_point_that_makes_nothing_is_told_as_a_wrong_value(acme):
    """Also by `ctxflow site check`, which catches what `make` says, and nothing else."""
    with pytest.raises(ValueError, match="the scaling policy 'count' cannot be made so: 3 is neither a class nor"):
        make("scaling", {"policy": "count"})
