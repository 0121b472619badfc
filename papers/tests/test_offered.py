"""What the distribution offers: an experiment for each paper, found by its entry point and imported only when run."""

import importlib.metadata
import subprocess
import sys
import zipfile

import pytest

from ctxflow.simulator.experiments import GROUP, Experiment, experiment_names, find_experiment
from waiting import patience

PAPERS = ["flextopo", "gh-agh", "pervasive-context", "torta", "turboserve"]


def test_the_five_papers_are_offered():
    own = [
        point.name for point in importlib.metadata.distribution("ctxflow-papers").entry_points if point.group == GROUP
    ]
    assert sorted(own) == PAPERS
    assert set(PAPERS) <= set(experiment_names())


@pytest.mark.parametrize("name", PAPERS)
def test_an_experiment_is_called_as_its_entry_point_is(name):
    found = find_experiment(name)
    assert isinstance(found, Experiment) and found.name == name and found.help


def test_the_help_lists_them():
    done = subprocess.run(
        [sys.executable, "-m", "ctxflow", "reproduce", "--help"],
        capture_output=True,
        text=True,
        timeout=patience(),
        check=True,
    )
    assert all(name in done.stdout for name in PAPERS)


def test_to_find_an_experiment_is_to_import_nothing_that_it_runs():
    program = (
        "import sys\nfrom ctxflow.simulator.experiments import find_experiment\n"
        f"for name in {PAPERS}: find_experiment(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), check=True
    )
    imported = {name for name in done.stdout.split() if name.startswith("ctxflow_papers.")}
    assert {name.count(".") for name in imported} == {1}
    assert not {"torch", "matplotlib", "gymnasium", "scipy"} & set(done.stdout.split())


@pytest.fixture(scope="module")
def wheel(clean_tree, build, tmp_path_factory):
    return zipfile.ZipFile(build("wheel", clean_tree / "papers", tmp_path_factory.mktemp("papers")))


def test_its_wheel_has_its_data_and_no_tests(wheel):
    held = set(wheel.namelist())
    assert {"ctxflow_papers/py.typed", "ctxflow_papers/torta/data.json", "ctxflow_papers/gh_agh/day.py"} <= held
    assert not [name for name in held if not name.startswith(("ctxflow_papers/", "ctxflow_papers-"))]
