"""`ctxflow plan --problem` as a person meets it."""

import json
import subprocess
import sys

from ctxflow.policies.placement.instances import draw


def plan(*arguments):
    program = [sys.executable, "-m", "ctxflow", "plan", *arguments]
    return subprocess.run(program, capture_output=True, check=False, text=True, timeout=100)


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
    assert "Llama-3B" in run.stdout and "rental" in run.stdout


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
