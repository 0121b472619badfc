"""Apps with alternatives on a real engine: who answered, and what makes no sense."""

from __future__ import annotations

import json

import pytest

from ctxflow import Alternative, ContextExecutor, batch_app, context, context_app
from ctxflow.app_options import read_errors
from ctxflow.batch.driver import run_job
from ctxflow.batch.job import Job
from ctxflow.policies.protocols import Plan


@context
def large():
    return "large"


@context
def small():
    return "small"


LARGE, SMALL = large(), small()


class Halves:
    """A placement that has alternatives answer half of the items."""

    def plan(self, view):
        shares = {}
        for app in view.apps.values():
            if app.alternative_of:
                shares[app.alternative_of, app.context] = 0.5
                shares[app.alternative_of, view.apps[app.alternative_of].context] = 0.5
        return Plan(shares=shares)


@batch_app(LARGE, error=0.1, alternatives=[Alternative(SMALL, error=0.3)], max_error=0.2, batch_size=5)
def ask(model, items):
    return [[model, item] for item in items]


def test_results_say_which_context_answered():
    with ContextExecutor(workers=2, placement=Halves()):
        answers = ask.map(range(40))
        results = list(answers)
        one = ask(7)
        assert one.result() == [one.context, 7]
    assert [item for _, item in results] == list(range(40))
    assert answers.answered == {"large": 20, "small": 20}
    assert sum(model == "small" for model, _ in results) == 20


def test_without_a_plan_that_divides_the_apps_own_context_answers():
    with ContextExecutor(workers=1):
        answers = ask.map(range(12))
        assert {model for model, _ in answers} == {"large"} and answers.answered == {"large": 12}


def test_a_batch_writes_who_answered(tmp_path, monkeypatch):
    monkeypatch.setattr("ctxflow.batch.work.BareExecutor", lambda site: ContextExecutor(site, placement=Halves()))
    rows = tmp_path / "rows.csv"
    rows.write_text("item\n" + "".join(f"{n}\n" for n in range(20)))
    monkeypatch.syspath_prepend(str(tmp_path))
    job = Job(input=rows, output=tmp_path / "out.jsonl", function=f"{__name__}:ask", column=("item",), workers=1)
    assert run_job(job).exit_status == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and all(line["result"][0] == line["context"] for line in lines)
    assert sorted({line["context"] for line in lines}) == ["large", "small"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_error": -0.1}, ValueError, "max_error"),
        ({"max_error": float("nan")}, ValueError, "max_error"),
        ({"error": 1.5}, ValueError, "error"),
        ({"max_delay": 0}, ValueError, "max_delay"),
        ({"error": 0.3, "max_error": 0.2}, ValueError, "an alternative"),
        ({"alternatives": [SMALL]}, TypeError, "Alternative"),
    ],
    ids=str,
)
def test_what_makes_no_sense(options, error, text):
    with pytest.raises(error, match=text):
        batch_app(LARGE, **options)(lambda model, items: items)


@pytest.mark.parametrize("alternatives", [[Alternative(LARGE)], [Alternative(SMALL), Alternative(SMALL)]])
def test_a_context_that_is_there_twice(alternatives):
    twice = batch_app(LARGE, alternatives=alternatives)(lambda model, items: items)
    with ContextExecutor(workers=1), pytest.raises(ValueError, match="differ"):
        twice.map([1])


def test_alternatives_of_what_they_cannot_be():
    with pytest.raises(TypeError, match="recipe"):
        Alternative(large)
    with pytest.raises(ValueError, match="error"):
        Alternative(SMALL, error=-1)
    with pytest.raises(TypeError, match="give the app one"):
        batch_app(None, alternatives=[Alternative(SMALL)])(lambda items: items)
    with pytest.raises(TypeError, match="batch apps"):
        context_app(LARGE, alternatives=[Alternative(SMALL)])(lambda model: model)


def test_errors_come_from_an_evaluation(tmp_path):
    path = tmp_path / "evaluation.json"
    entries = [("small", 0.3), ("small", 0.2), ("large", 0.1), ("none", None)]
    path.write_text(json.dumps({"evaluations": [{"model": model, "error": error} for model, error in entries]}))
    assert read_errors(path) == {"small": 0.2, "large": 0.1}
