"""The reference page is what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxflow.sites import load_site
from ctxflow.sites.listing import toml_lines
from ctxflow.sites.loader import parse
from ctxflow.sites.reference import reference
from ctxflow.sites.site_model import Region, Site, Tier

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date():
    advice = "run `python -m ctxflow.sites.reference > docs/sites.md`"
    assert (DOCS / "sites.md").read_text() == reference(), advice


def test_every_key_is_there():
    page = reference()
    for model in (Site, Tier, Region):
        for key, field in model.model_fields.items():
            assert f"| `{key}` | " in page and field.description in page


def test_its_example_loads(tmp_path):
    example = reference().split("```toml\n")[1].split("```")[0]
    (tmp_path / "site.toml").write_text(example)
    assert [tier.provider for tier in load_site(tmp_path / "site.toml").tiers] == ["condor", "slurm"]


@pytest.mark.parametrize(
    "text",
    ['Arch == "X86_64"', "both ' and \"", "C:\\path", "tab\tline\n", "ü ☃ \x7f", "", "'''", '"""', "# no comment"],
)
def test_what_is_written_out_reads_as_it_was(text):
    tier = Tier(requirements=text, submit={"+Key": text, "plain": 3, "yes": True}, variables={"A": text})
    lines = [line for line, _ in toml_lines(Site(engine="taskvine", tiers=(tier,)))]
    assert Site(**parse("\n".join(lines))).tiers == (tier,)
