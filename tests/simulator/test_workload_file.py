"""The page about workload files is what the models say, and its examples work."""

from pathlib import Path

from ctxflow.simulator.scenario import load_scenario
from ctxflow.simulator.studies import play
from ctxflow.simulator.workload_file import reference

DOCS = Path(__file__).resolve().parents[2] / "docs"
SITE = 'engine = "taskvine"\n[[tiers]]\nname = "a10"\nworkers = 20\n[[tiers]]\nname = "titan-x"\nworkers = 20\n'


def test_the_page_is_up_to_date():
    advice = "run `python -m ctxflow.simulator.workload_file > docs/workloads.md`"
    assert (DOCS / "workloads.md").read_text() == reference(), advice


def test_its_examples_are_simulated(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    for part in reference().split("```toml\n")[1:]:
        (tmp_path / "work.toml").write_text(part.split("```")[0])
        assert play(load_scenario(str(tmp_path / "site.toml"), tmp_path / "work.toml")).finished
