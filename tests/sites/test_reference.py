"""The reference page is what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxflow.sites import load_site
from ctxflow.sites.reference import reference, toml_lines
from ctxflow.sites.site_model import Region, Site, Tier
from ctxflow.sites.site_problems import SiteError, parse

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
    tier = Tier(requirements=text, submit={"+Key": text, "plain": 3, "yes": True}, env={"A": text})
    lines = [line for line, _ in toml_lines(Site(engine="taskvine", tiers=(tier,)))]
    assert Site(**parse("\n".join(lines))).tiers == (tier,)


def test_keys_by_their_old_names_work_and_are_told_once(tmp_path, caplog):
    from ctxflow.renamed import RenamedWarning

    path = tmp_path / "site.toml"
    tier = "[[tiers]]\nname = 'a'\nvariables = {N = '4'}\n"
    path.write_text(f"engine = 'taskvine'\nenvironment = '/opt/ctxflow'\n{tier}")
    for _ in range(2):
        made = load_site(path)
        assert made.python_environment == "/opt/ctxflow" and made.tiers[0].env == {"N": "4"}
    assert sorted(caplog.messages) == [
        f"{path}: environment is now called python_environment",
        f"{path}: variables is now called env",
    ]
    path.write_text(f"engine = 'taskvine'\nenvironment = '~/env'\n{tier.replace('4', '4', 1)}")
    with pytest.raises(SiteError, match=r"line 2: python_environment cannot begin with ~"):
        load_site(path)
    with pytest.warns(RenamedWarning, match="environment of a site is now called python_environment") as told:
        assert Site(environment="/opt/ctxflow").python_environment == "/opt/ctxflow"
    assert [each.filename for each in told] == [__file__]
    with pytest.warns(RenamedWarning, match="variables of a tier is now called env"):
        assert Tier(variables={"A": "1"}).env == {"A": "1"}
