"""`ctxflow topo` and `ctxflow preempt` as a person meets them."""

import json
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxflow.cli.app import app, main
from ctxflow.topology import from_graph, to_graph
from ctxflow.topology.machine import read_machine

FIGURE_3 = Path(__file__).parents[1] / "policies" / "preemption" / "data" / "figure3.json"


@pytest.fixture
def command(capsys, monkeypatch):
    """The command as from a shell, in this process: its output and its exit status."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ctxflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def pair(tmp_path):
    """A file with this machine, and one in which it has a GPU more."""
    here = to_graph(read_machine())
    here["nodes"] = [node for node in here["nodes"] if node["type"] != "GPU"]
    here["edges"] = [edge for edge in here["edges"] if not edge["source"].startswith("gpu")]
    more = json.loads(json.dumps(here))
    more["nodes"].append({"id": "gpu-0", "type": "GPU", "attributes": {"uuid": "GPU-1", "name": "NVIDIA A10"}})
    for name, data in (("here.json", here), ("more.json", more)):
        (tmp_path / name).write_text(json.dumps(data))
    return tmp_path / "here.json", tmp_path / "more.json"


def test_this_machine_is_drawn_and_is_json(command):
    run = command("topo")
    assert run.returncode == 0, run.stderr
    assert "└─ NUMA" in run.stdout
    run = command("topo", "--json")
    assert from_graph(json.loads(run.stdout)) == read_machine()


def test_an_ad_read_back_is_the_same(tmp_path):
    (tmp_path / "ad").write_text(invoke("topo", "--classad").output)
    found = json.loads(invoke("topo", "--file", tmp_path / "ad", "--json").output)
    assert found["nodes"] == to_graph(read_machine())["nodes"]


def test_only_changes_are_published(pair, tmp_path):
    here, more = pair
    state = tmp_path / "state.json"
    first = invoke("topo", "--classad", "--file", more, "--state", state)
    assert "CtxflowGpus" in first.stdout
    again = invoke("topo", "--classad", "--file", more, "--state", state)
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")
    gone = invoke("topo", "--classad", "--file", here, "--state", state)
    assert "CtxflowGpus = { }" in gone.stdout
    assert "GPU 0 (NVIDIA A10, GPU-1) is gone" in gone.stderr
    assert list(tmp_path.glob("state*")) == [state], "nothing is left beside it"


def test_a_startd_that_starts_anew_is_told_all_again(pair, tmp_path):
    state = tmp_path / "state.json"
    invoke("topo", "--classad", "--file", pair[0], "--state", state)
    kept = json.loads(state.read_text())
    state.write_text(json.dumps(kept | {"asker": "1 2"}))
    assert "CtxflowGpus" in invoke("topo", "--classad", "--file", pair[0], "--state", state).stdout
    state.write_text("rubbish")
    assert "CtxflowGpus" in invoke("topo", "--classad", "--file", pair[0], "--state", state).stdout


def test_a_file_that_is_no_topology(command, tmp_path):
    (tmp_path / "x").write_text("hello")
    run = command("topo", "--file", tmp_path / "x")
    assert run.returncode == 1
    assert run.stderr == f"ctxflow: {tmp_path / 'x'}: line 1 is no attribute of a machine ad: hello\n"


def test_two_forms_at_once():
    assert invoke("topo", "--json", "--classad").exit_code == 2


def test_a_case_given_as_data(command):
    run = command("preempt", "--cluster", FIGURE_3, "--policy", "imp", "--json")
    assert run.returncode == 0, run.stderr
    decision = json.loads(run.stdout)
    assert decision["node"] == "machine-1" and decision["victims"] == ["c-1", "c-2", "c-3", "c-4"]
    assert decision["hit"] is True and decision["level"] == "socket" and decision["policy"] == "imp"


@pytest.mark.parametrize("policy", ["standard", "imp", "exhaustive", "exact"])
def test_all_policies_in_words(policy):
    run = invoke("preempt", "--cluster", FIGURE_3, "--policy", policy)
    assert run.exit_code == 0
    assert "a-2 goes to machine-1, in one socket." in run.output
    assert "gives way    c-1, c-2, c-3, c-4" in run.output


def test_a_case_with_no_place(tmp_path):
    data = json.loads(FIGURE_3.read_text())
    data["preemptor"]["priority"] = 50
    (tmp_path / "case.json").write_text(json.dumps(data))
    run = invoke("preempt", "--cluster", tmp_path / "case.json")
    assert (run.exit_code, run.output) == (
        1,
        "a-2 fits on none of 3 nodes aligned, whoever of lower priority gives way.\n",
    )
    found = invoke("preempt", "--cluster", tmp_path / "case.json", "--json")
    assert (found.exit_code, json.loads(found.output)["node"]) == (1, None)


def test_a_case_that_is_wrong(command, tmp_path):
    data = json.loads(FIGURE_3.read_text())
    del data["preemptor"]
    for text, says in ((json.dumps(data), "names no preemptor"), ("{", "is no JSON")):
        (tmp_path / "case.json").write_text(text)
        run = command("preempt", "--cluster", tmp_path / "case.json")
        assert run.returncode == 1
        assert says in run.stderr and run.stderr.count("\n") == 1


def test_the_condor_configuration_runs_a_command_that_there_is(tmp_path):
    text = (Path(__file__).parents[2] / "site-configs" / "htcondor-topology.conf").read_text()
    settings = dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line and not line.startswith("#"))
    assert settings["STARTD_CRON_JOBLIST"].split()[-1] == "CTXFLOW_TOPOLOGY"
    words = settings["STARTD_CRON_CTXFLOW_TOPOLOGY_ARGS"].replace("$(LOCK)", str(tmp_path)).split()
    run = invoke(*words)
    assert run.exit_code == 0 and run.stdout.endswith("\n-\n")
    assert (tmp_path / "ctxflow-topology.json").exists()
    assert invoke(*words).stdout == ""
