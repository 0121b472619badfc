"""Engines by name: their tables in a site file, those of other packages, and the keys that earlier versions had."""

from __future__ import annotations

import logging
import sys

import pytest

from ctxflow.renamed import RenamedWarning
from ctxflow.sites import Site, SiteError, load_site
from ctxflow.sites.engine_kinds import engine_kind, engine_names
from ctxflow.sites.reference import as_data, toml_lines
from ctxflow.sites.site_rules import hints

HEAD = 'engine = "taskvine"\n'
TIERS = "[[tiers]]\nname = 'a10'\n"
MODULE = """
import pydantic
from ctxflow.sites.engine_kinds import Capabilities, EngineOptions

class Options(EngineOptions):
    shells: int = pydantic.Field(1, ge=1, description="How many.")
    host: str = pydantic.Field(description="The host that lends them.")

    @pydantic.field_validator("host")
    @classmethod
    def _host(cls, host):
        if "." not in host:
            raise ValueError("write the whole name")
        return host

class Engine:
    Options = Options
    capabilities = Capabilities(remote=True)

    @classmethod
    def from_site(cls, site):
        return cls()

    def tiers(self):
        return []

class Bare:
    pass
"""
ENTRIES = """[ctxflow.engines]
acme = acme_engines:Engine
bare = acme_engines:Bare
gone = acme_engines_gone:Engine
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A package as pip leaves it in site-packages."""
    (tmp_path / "acme_engines.py").write_text(MODULE)
    info = tmp_path / "acme_engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_engines", None)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return write


def lines(path):
    with pytest.raises(SiteError) as caught:
        load_site(path)
    return [line.removeprefix(f"{path}, ") for line in caught.value.lines]


def test_an_engine_s_keys_stand_in_its_table(write):
    site = load_site(write(HEAD + "[taskvine]\nfan_out = 3\nport = [9000, 9100]\n" + TIERS))
    assert (site.taskvine.fan_out, list(site.options.ports)) == (3, list(range(9000, 9101)))
    assert load_site(write("[embedded]\ngpus_per_worker = 2")).options.gpus_per_worker == 2


def test_where_earlier_versions_had_them_they_still_work_and_are_told_once(write, caplog):
    path = write("fan_out = 3\nssl = true\n" + HEAD + TIERS)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        first, second = load_site(path), load_site(path)
    assert first == second == load_site(write(HEAD + "[taskvine]\nfan_out = 3\nssl = true\n" + TIERS))
    assert caplog.messages == [
        f"{path}: write ssl, fan_out under a header [taskvine]: each engine has a table of its own keys"
    ]


def test_a_program_that_gives_them_so_is_warned():
    with pytest.warns(RenamedWarning, match=r"fan_out of a site: write Site\(taskvine=\{'fan_out': \.\.\.\}\)"):
        site = Site(fan_out=3)
    assert site.taskvine.fan_out == site.fan_out == 3
    with pytest.raises(AttributeError):
        site.fan_in


def test_a_program_may_change_single_keys(write):
    path = write(HEAD + "[taskvine]\nfan_out = 3\n" + TIERS)
    assert load_site(path, port=9000).taskvine == load_site(path, taskvine={"fan_out": 3, "port": 9000}).taskvine


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[taskvine]\nfan_uot = 3", "line 2: [taskvine] has no key 'fan_uot': did you mean 'fan_out'?"),
        ("[taskvine]\nzebra = 3", "line 2: [taskvine] has no key 'zebra': [taskvine]'s keys are address, port, ssl, "),
        ("[embedded]\ngpus_per_worker = -1", "line 2: gpus_per_worker cannot be -1: write 0 or more"),
        ("[taskvine]\nport = 'any'", 'line 2: port cannot be "any": write a port, such as port = 9123'),
        ("[taskvine]\nport = [2, 1]", "line 2: port has the highest first"),
        (
            "[taskvine]\ntransfer_port = [9100, 9000]",
            "line 2: transfer_port has the highest first: write transfer_port =",
        ),
        (
            "[taskvine]\ntransfer_port = [0, 9000]",
            "line 2: transfer_port cannot be [0, 9000]: write a number from 1024",
        ),
        ("[taskvine]\nworker_transfers = 'some'", "line 2: worker_transfers cannot be "),
        ("taskvine = 3", "line 1: taskvine cannot be 3: write [taskvine] on a line of its own"),
        ("fan_uot = 3", "line 1: a site has no key 'fan_uot': did you mean 'fan_out'?"),
        (HEAD + TIERS + "port = 9123", "line 4: a tier has no key 'port' (tier a10); it is the engine's: put it under"),
        (
            'engine = "acme"\n[acme]\nhost = "a"',
            'line 1: engine cannot be "acme": write "embedded" or "taskvine"',
        ),
    ],
)
def test_a_mistake_in_a_table_is_told(write, text, told):
    [line] = lines(write(text))
    assert line.startswith(told)


def test_an_engine_of_another_package_is_selected_by_its_name(acme, write):
    assert engine_names() == ["embedded", "taskvine", "acme", "bare", "gone"]
    path = write('engine = "acme"\n[acme]\nhost = "x.example.org"\nshells = 3\n')
    site = load_site(path, workers=2)
    assert (site.options.shells, site.workers, site.capabilities.remote) == (3, 2, True)
    assert site == load_site(site) == Site(engine="acme", workers=2, acme={"host": "x.example.org", "shells": 3})
    assert engine_kind("acme").load().__name__ == "Engine"
    written = write("\n".join(line for line, _ in toml_lines(site)))
    assert load_site(written) == site
    assert as_data(site)["given"] == ["engine", "workers", "acme.shells", "acme.host"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[acme]\nshells = 0\nhost = "a.b"', "line 3: shells cannot be 0: write 1 or more"),
        ('[acme]\nshell = 1\nhost = "a.b"', "line 3: [acme] has no key 'shell': did you mean 'shells'?"),
        ('[acme]\nhost = "a"', 'line 3: host cannot be "a": write the whole name'),
        ("[acme]\nshells = 2", "line 2: [acme] needs host: The host that lends them."),
        ("", "[acme] needs host: The host that lends them."),
        ('[acme]\nhost = "a.b"\n' + TIERS, "line 1: the acme engine has no tiers"),
    ],
)
def test_its_own_model_checks_its_table(acme, write, text, told):
    [line] = lines(write('engine = "acme"\n' + text))
    assert told in line


def test_what_cannot_be_an_engine_is_told(acme, write):
    assert "bare' is acme_engines:Bare, which has no 'from_site'" in lines(write('engine = "bare"'))[0]
    assert "cannot be imported from acme_engines_gone:Engine: ModuleNotFoundError" in lines(write('engine = "gone"'))[0]
    [line] = lines(write('engine = "acne"'))
    assert line.endswith("write one of embedded, taskvine, acme, bare, gone; did you mean 'acme'?")


def test_keys_that_the_engine_does_not_look_at_are_told():
    assert list(hints(Site(taskvine={"fan_out": 3}, acquire="factory"))) == [
        'acquire does nothing with the embedded engine: leave it out, or write engine = "taskvine" for a cluster',
        'fan_out does nothing with the embedded engine: leave it out, or write engine = "taskvine" for a cluster',
    ]
    tier = {"name": "a10"}
    assert list(hints(Site(engine="taskvine", tiers=[tier], embedded={"gpus_per_worker": 1}))) == [
        "gpus_per_worker is for the embedded engine: write gpus in each tier"
    ]
