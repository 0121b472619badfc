"""Site files: what loads, and what is said of what does not."""

import dataclasses

import pytest

from ctxflow import ContextExecutor
from ctxflow.policies.batching import Fixed
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
        ("worker = 2", r"^a site has no key 'worker': did you mean 'workers'\?$"),
        ("zebra = 2", r"^a site has no key 'zebra': a site's keys are name, engine, workers, "),
        ("workers = 0", "^the site's workers cannot be 0: input should be greater than or equal to 1$"),
        ('workers = "many"', "^the site's workers cannot be 'many': input should be a valid integer"),
        ('engine = "cloud"', "^the site's engine cannot be 'cloud': input should be 'embedded'"),
        ("slots = 1.5", r"^the site's slots cannot be 1.5: "),
        ("gpus_per_worker = -1", "^the site's gpus_per_worker cannot be -1: "),
        ("scratch = 3", "^the site's scratch cannot be 3: input should be a valid string$"),
        ("worker = 1\nslots = 0", "no key 'worker'.*; the site's slots|the site's slots.*; a site has no key 'worker'"),
        ("workers == 2", "site.toml is not TOML: "),
        ("\udcff", "site.toml is not TOML: "),
    ],
)
def test_wrong_files_say_what_to_write(tmp_path, text, message):
    path = tmp_path / "site.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_site(path)


def test_wrong_places_say_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r'there is no site \'lokal\': give "local" or the path of a site file'):
        load_site("lokal")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load_site(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('routing = "fastest"', "there is no routing policy 'fastest': choose one of context-affinity, least-loaded"),
        (
            'batching = {policy = "fixed", sise = 3}',
            "policy 'fixed' has no option 'sise': it takes size, linger, share",
        ),
        ("batching = {size = 3}", r'the batching policy has no name: write \{policy = "...", ...\}'),
        ('batching = {policy = "fixed", size = 0}', "size is the number of items in a batch: give 1 or more"),
        ("routing = 5", r"the routing policy cannot be 5, which has no 'assign': give a name \(context-affinity"),
    ],
)
def test_wrong_policies_say_which_there_are(write, text, message):
    with pytest.raises(ValueError, match=message):
        ContextExecutor(site=str(write(text)))
