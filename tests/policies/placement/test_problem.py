"""The problem as data: JSON, and what is refused."""

import json
from pathlib import Path

import pytest

from ctxflow.policies.agh import METHODS, solve
from ctxflow.policies.agh.problem import Problem, azure_instance, paper_instance
from ctxflow_papers.gh_agh.instances import draw, from_trace

TRACE = Path(__file__).parents[4] / "shared" / "data" / "azure" / "AzureLLMInferenceTrace2023_code.csv"


@pytest.mark.parametrize("problem", [paper_instance(), azure_instance(), draw(5, (2, 3, 4))], ids=lambda p: p.name)
def test_json_is_lossless(problem):
    assert Problem.from_json(problem.to_json()) == problem


def test_paper_instance_is_the_stated_draw():
    assert paper_instance() == draw(1).model_copy(update={"name": "paper"})


def test_draws_differ_by_seed_and_not_otherwise():
    assert draw(1, (3, 3, 3)) == draw(1, (3, 3, 3)) != draw(2, (3, 3, 3))


def test_larger_draws_vary_the_paper_s_models_and_tiers():
    problem = draw(0, (8, 7, 12))
    assert problem.shape == (8, 7, 12)
    assert problem.models[6].weights_gb != problem.models[0].weights_gb
    assert problem.tiers[10].dollars_per_hour != problem.tiers[0].dollars_per_hour


def test_azure_instance_comes_from_the_trace():
    if not TRACE.exists():
        pytest.skip(f"the Azure trace is not at {TRACE}")
    assert from_trace(TRACE) == azure_instance()


def test_a_small_trace(tmp_path):
    rows = "".join(f"2023-11-16 18:{n:02}:00.0000000,{100 * n + 50},{7 * n % 50 + 1}\n" for n in range(60))
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    kinds = from_trace(path).query_types
    assert sum(kind.queries_per_hour for kind in kinds) == pytest.approx(60 / (59 / 60), rel=1e-4)
    assert kinds[0].input_tokens < kinds[2].input_tokens < kinds[4].input_tokens
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no trace with TIMESTAMP"):
        from_trace(path)


def changed(*path_and_value):
    """The paper's instance as data, with one value changed."""
    *path, last, value = path_and_value
    data = json.loads(paper_instance().to_json())
    place = data
    for key in path:
        place = place[key]
    place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("tiers", 2, "memory_gb", -3), r"tiers\[2\]\.memory_gb"),
        (("query_types", 0, "max_error", 1.5), r"query_types\[0\]\.max_error"),
        (("query_types", 1, "queries_per_hour", "many"), r"query_types\[1\]\.queries_per_hour"),
        (("models", 0, "weights_gb", 0), r"models\[0\]\.weights_gb"),
        (("budget_dollars", float("nan")), r"budget_dollars"),
        (("horizon_hours", float("inf")), r"horizon_hours"),
        (("tiers", 0, "tensor_parallel", []), r"tiers\[0\]\.tensor_parallel"),
        (("tiers", 0, "gpus", -1), r"tiers\[0\]\.gpus"),
        (("models", 1, "name", "Llama-1B"), r"models: the name 'Llama-1B' is there twice"),
        (("error", 0, 1, [0.1]), r"error\[0\]\[1\]: has numbers for 1 tier, and there are 10"),
        (("error", 0, 1, 2, -0.1), r"error\[0\]\[1\]\[2\]"),
        (("query_types", []), r"query_types"),
        (("memory", 3), r"memory"),
        (("format", "another/1"), r"format"),
    ],
)
def test_nonsense_is_refused_with_the_field_s_name(change, field):
    with pytest.raises(ValueError, match=field):
        Problem.from_json(changed(*change))


def test_what_is_missing_is_named():
    data = json.loads(paper_instance().to_json())
    del data["query_types"][3]["unserved_dollars"]
    with pytest.raises(ValueError, match=r"query_types\[3\]\.unserved_dollars: field required"):
        Problem.from_data(data)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Problem.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Problem.read(tmp_path / "bad.json")


@pytest.mark.parametrize("value", ["100", True, None, [], {}])
def test_what_is_not_a_number_is_refused_where_one_is_wanted(value):
    data = json.loads(paper_instance().to_json())
    data["budget_dollars"] = value
    with pytest.raises(ValueError, match="budget_dollars: input should be a number"):
        Problem.from_data(data)
    data = json.loads(paper_instance().to_json())
    data["tiers"][0]["gpus"] = value
    if value is not None:
        with pytest.raises(ValueError, match=r"tiers\[0\].gpus: input should be a number"):
            Problem.from_data(data)


@pytest.mark.parametrize("text", ["[]", '"text"', "null", "3"])
def test_a_file_that_is_no_object_is_refused_in_words(text):
    with pytest.raises(ValueError, match="the problem cannot be: input should be an object"):
        Problem.from_json(text)


def test_a_file_that_is_nested_too_deep_is_refused():
    with pytest.raises(ValueError, match="the problem is not JSON"):
        Problem.from_json("[" * 100_000)


def test_numbers_that_cannot_be_computed_with_are_refused_and_vast_limits_are_none():
    data = json.loads(paper_instance().to_json())
    data["query_types"][0]["queries_per_hour"] = 1e300
    with pytest.raises(ValueError, match="queries_per_hour: input should be less"):
        Problem.from_data(data)
    data = json.loads(paper_instance().to_json())
    data["query_types"][0]["max_delay_seconds"] = data["budget_dollars"] = data["storage_gb"] = 1e308
    assert all(solve(Problem.from_data(data), method).feasible for method in METHODS)
