"""Site files: what loads, and what is said of what does not."""

import dataclasses

import pytest

from ctxflow import ContextExecutor
from ctxflow.policies.simple import Fixed
from ctxflow.sites import Site, load_site

FILE = """
name = "lab"
workers = 3
slots = 2
routing = "least-loaded"

[batching]
policy = "fixed"
size = 7
linger = 0.5
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return write


def test_a_site_file_loads(write):
    site = load_site(write(FILE))
    assert (site.name, site.engine, site.workers, site.slots, site.routing) == ("lab", "embedded", 3, 2, "least-loaded")
    executor = ContextExecutor(site=str(write(FILE)), workers=2)
    assert executor.resolved_site.workers == 2 and executor.engine.workers == 2, "what is said in the program counts"
    assert executor._policies.batching.linger == 0.5
    assert type(executor._policies.routing).__name__ == "LeastLoaded"


def test_a_site_file_runs(write, tmp_path):
    executor = ContextExecutor(site=str(write(FILE.replace("workers = 3", "workers = 1"))))
    executor.run_dir = str(tmp_path / "run")
    with executor:
        assert executor.submit(pow, {}, 2, 5).result() == 32


def test_names_and_models():
    assert load_site("local") == Site() and load_site(Site(workers=2)).workers == 2
    assert load_site(Site(workers=2), workers=5, slots=None).workers == 5
    assert load_site(load_site("local", workers=4)) == Site(workers=4)


def test_a_policy_object_in_a_site_stays_as_it_is():
    @dataclasses.dataclass
    class Three(Fixed):
        linger: float = 0.0

    policy = Three()
    assert load_site(Site(batching=policy), workers=1).batching is policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('routing = "fastest"', "there is no routing policy 'fastest': choose one of context-affinity, least-loaded"),
        (
            'batching = {policy = "fixed", sise = 3}',
            "policy 'fixed' has no option 'sise': it takes size, linger, share",
        ),
        ('batching = {policy = "fixed", size = 0}', "size is the number of items in a batch: give 1 or more"),
    ],
)
def test_wrong_policies_say_which_there_are(write, text, message):
    with pytest.raises(ValueError, match=message):
        ContextExecutor(site=str(write(text)))
