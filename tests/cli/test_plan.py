"""`ctxflow plan --problem` as a person meets it."""

import json
import sys
import types

import pytest
from in_process import ctxflow

from ctxflow.cli.app import main
from ctxflow.policies.agh.problem import paper_instance
from ctxflow_papers.gh_agh.instances import draw
from suite.depth import for_release


def plan(*arguments):
    return ctxflow("plan", *arguments)


def test_a_problem_from_a_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(draw(1, (3, 3, 3)).to_json())
    totals = {}
    for method in ("agh", "exact"):
        run = plan("--problem", str(path), "--method", method, "--json")
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        assert found["feasible"] and found["method"] == method
        totals[method] = found["costs"]["total"]
    assert totals["exact"] <= totals["agh"] + 1e-6


def test_for_people():
    run = plan("--problem", "paper")
    assert run.returncode == 0, run.stderr
    assert "Llama-8B" in run.stdout and "rental" in run.stdout
    assert "planned with a margin of 25% on delays and errors" in run.stdout


def test_the_impossible(tmp_path):
    problem = draw(1, (3, 3, 3))
    must = tuple(kind.model_copy(update={"max_unserved": 0.0}) for kind in problem.query_types)
    path = tmp_path / "problem.json"
    path.write_text(problem.model_copy(update={"budget_dollars": 0.0, "query_types": must}).to_json())
    run = plan("--problem", str(path))
    assert run.returncode == 1
    assert "the budget of 0 $ does not pay" in " ".join(run.stdout.split())


def test_nonsense_is_one_sentence(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(draw(1, (3, 3, 3)).to_json().replace('"budget_dollars": 100.0', '"budget_dollars": -1'))
    run = plan("--problem", str(path))
    assert (run.returncode, run.stdout) == (1, "")
    assert (
        run.stderr
        == "ctxflow: the problem cannot be: budget_dollars: input should be greater than or equal to 0 (it is -1)\n"
    )
    assert plan("--problem", str(tmp_path / "none.json")).stderr.count("\n") == 1


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """`ctxflow plan` on a problem given as data, as from a shell but in this process: its exit status and output."""

    def run(problem, *arguments):
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(problem))
        monkeypatch.setattr(sys, "argv", ["ctxflow", "plan", "--problem", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


def paper(*changes):
    """The paper's instance as data, with values changed; None leaves one out, and * stands for all of a list."""
    data = json.loads(paper_instance().to_json())
    for *path, last, value in changes:
        places = [data]
        for key in path:
            places = (
                [each for place in places for each in (place[key] if isinstance(place[key], list) else [place[key]])]
                if key != "*"
                else places
            )
        for place in places:
            if value is None:
                del place[last]
            else:
                place[last] = value
    return data


MUST_SERVE = ("query_types", "*", "max_unserved", 0.0)


IMPOSSIBLE = [
    ([("budget_dollars", 0.0)], "5c", "the budget of 0 $ does not pay for any model on any tier"),
    ([("tiers", "*", "memory_gb", 0.01)], "5f", "no model fits any tier: Llama-1B takes 2 GB"),
    ([("tiers", "*", "gpus", 0)], "gpus", "no tier has as many GPUs"),
    ([("storage_gb", 1.0)], "5h", "the storage of 1 GB holds no model"),
    ([("query_types", "*", "max_delay_seconds", 1e-6)], "5i", "a delay of 1e-06 s cannot be kept"),
    ([("query_types", "*", "max_error", 0.0)], "5j", "an error of 0 cannot be kept"),
    (
        [("query_types", "*", "max_error", 0.0088), ("query_types", "*", "max_delay_seconds", 1.0)],
        "5j",
        "contradict each other",
    ),
]


@pytest.mark.parametrize(
    ("method", "change", "constraint", "text"),
    [
        *(("agh", *each) for each in IMPOSSIBLE),
        ("exact", *IMPOSSIBLE[0]),
        *for_release(*(("exact", *each) for each in IMPOSSIBLE[1:])),
    ],
)
def test_an_impossible_problem_says_which_constraint_makes_it_so(command, method, change, constraint, text):
    problem = paper(MUST_SERVE, *change)
    run = command(problem, "--method", method, "--json")
    assert run.returncode == 1
    found = json.loads(run.stdout)
    assert not found["feasible"]
    assert any(each["constraint"] == constraint and text in each["text"] for each in found["reasons"])
    shown = command(problem, "--method", method)
    assert shown.returncode == 1
    assert text in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("budget_dollars", -1.0), "budget_dollars"),
        (("budget_dollars", float("nan")), "budget_dollars"),
        (("horizon_hours", 0), "horizon_hours"),
        (("storage_gb", "much"), "storage_gb"),
        (("utilization", 1.5), "utilization"),
        (("query_types", "*", "max_error", 2.0), "query_types[0].max_error"),
        (("query_types", "*", "queries_per_hour", -5), "query_types[0].queries_per_hour"),
        (("query_types", "*", "unserved_dollars", None), "query_types[0].unserved_dollars"),
        (("tiers", "*", "memory_gb", float("inf")), "tiers[0].memory_gb"),
        (("tiers", "*", "tensor_parallel", [0]), "tiers[0].tensor_parallel[0]"),
        (("models", "*", "weights_gb", 0), "models[0].weights_gb"),
        (("models", []), "models"),
        (("error", [[[0.1]]]), "error"),
        (("dollars", 3), "dollars"),
    ],
)
def test_nonsense_is_refused_with_the_field_s_name(command, change, field):
    run = command(paper(change))
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith(f"ctxflow: the problem cannot be: {field}: ") and run.stderr.count("\n") == 1


def test_a_margin_is_said_and_can_be_chosen(command):
    data = json.loads(command(paper(), "--margin", "0.1", "--json").stdout)
    assert set(data["margins"].values()) == {0.1}
    assert "without a margin" in command(paper(), "--margin", "0").stdout
    refused = command(paper(), "--margin", "-1")
    assert refused.returncode == 2
