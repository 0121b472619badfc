"""`ctxflow reproduce` finds experiments by their entry points, and says what is missing."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

from ctxflow.cli.app import main
from ctxflow.simulator import experiments
from ctxflow.simulator.experiments import Experiment, Figure, find_experiment
from waiting import patience

ASKED = []


def _run(request):
    request.progress(0.5, "half")
    ASKED.append(request)
    return {"seconds": Figure(2.0, "s", "lower", paper=4.0)}


MINE = Experiment("mine", "a paper of somebody's", _run)
NO_EXPERIMENT = "mine"


@pytest.fixture
def offered(monkeypatch):
    """Have these entry points found, and no others: name -> object of this module."""

    def offer(**named):
        points = [
            importlib.metadata.EntryPoint(name, f"{__name__}:{of}", experiments.GROUP) for name, of in named.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints(points))

    return offer


@pytest.fixture
def ctxflow(monkeypatch, capsys, tmp_path):
    """Run the command: its status, its output, and what it says on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ctxflow", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


def test_where_the_papers_are_not_installed_one_sentence_says_how_to_install_them(offered, ctxflow):
    offered()
    status, _, said = ctxflow("reproduce", "torta")
    assert status == 2
    assert said.startswith("ctxflow: the papers' experiments are not installed here: ") and said.count("\n") == 1
    assert "pip" in said and "papers" in said.partition("here: ")[2]


def test_an_experiment_of_any_distribution_is_run_and_its_figures_printed(offered, ctxflow):
    offered(mine="MINE")
    status, text, _ = ctxflow("reproduce", "mine", "--quick", "--seed", "7", "--json")
    found = json.loads(text)
    assert status == 0 and found["benchmark"] == "reproduce-mine"
    assert found["figures"]["seconds"] == {
        "value": 2.0, "unit": "s", "better": "lower", "spread": 0.0, "n": 1, "paper": 4.0
    }  # fmt: skip
    assert (ASKED[-1].quick, ASKED[-1].seed, ASKED[-1].pictures) == (True, 7, None)
    _, table, _ = ctxflow("reproduce", "mine")
    assert "mine: a paper of somebody's" in table and "0.50" in table


def test_an_unknown_paper_is_refused_with_those_that_there_are(offered, ctxflow):
    offered(mine="MINE", yours="MINE")
    status, _, said = ctxflow("reproduce", "thine")
    assert (status, said) == (2, "ctxflow: there is no 'thine' here: choose one of mine, yours\n")


def test_what_is_no_experiment_is_told(offered):
    offered(wrong="NO_EXPERIMENT")
    with pytest.raises(TypeError, match=r"wrong in ctxflow\.experiments"):
        find_experiment("wrong")


def test_help_imports_no_experiment():
    program = (
        "import sys; sys.argv = ['ctxflow', 'reproduce', '--help']\n"
        "import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from ctxflow.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), check=True
    )
    assert "Run a paper's experiments" in done.stdout and "--quick" in done.stdout
    assert not {name for name in done.stderr.split() if name.split(".")[0] in ("ctxflow_papers", "matplotlib", "torch")}
