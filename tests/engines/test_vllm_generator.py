"""`VLLMGenerator` against `TextGenerator` on the same model of random weights, and when it is interrupted or dies."""

from __future__ import annotations

import dataclasses

import pytest
from vllm_forks import run

from ctxflow.models import TextGenerator

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.

PROMPTS, LIMITS = ["The river", "A worker may be taken away", "Numbers such as 1, 2"], [12, 5, 20]


@pytest.fixture(scope="module")
def found(vllm_python, llama):
    return run(vllm_python, "generator", str(llama), PROMPTS, LIMITS)


def test_it_answers_as_the_generator_by_transformers(found, llama):
    plain = TextGenerator(llama, dtype="float32", device="cpu").generate(PROMPTS, max_new_tokens=LIMITS)
    expected = [dataclasses.asdict(each) for each in plain]
    for each in [*expected, *found["answers"]]:
        each["text"] = each["text"].rstrip("\ufffd")  # vLLM gives no half of a character.
    assert found["answers"] == expected
    answer, error = found["chat"]
    assert answer["completion_tokens"] <= 8 and answer["prompt_tokens"] == 17 and error == "InputTooLong"
    assert found["seeded"][0] == found["seeded"][1]
    assert found["answers"][0]["text"].startswith(found["stopped"]) and len(found["stopped"]) <= 3


def test_its_start_tells_its_parts_those_of_the_engine_core_too(found):
    seconds, parts = found["parts"]
    assert {"imports", "weights", "warm-up", "engine", "build"} <= set(parts)
    assert min(parts["imports"], parts["weights"], parts["warm-up"]) > 0
    assert sum(parts.values()) == pytest.approx(seconds, abs=1e-4)


def test_a_model_that_vllm_does_not_know_yet_is_inspected_in_the_same_process(found):
    assert not any("model_executor.models.registry" in command for command in found["commands"])


def test_it_answers_after_it_was_parked_as_before(found):
    assert found["parks"]
    assert found["woken"] == [found["answers"]] * 2


def test_it_goes_on_after_ctrl_c(found):
    assert found["interrupted"] == 1


def test_a_dead_engine_raises_at_once_and_leaves_nothing(found):
    assert len(found["lost"]) == 2 and found["lost"][0] == found["lost"][1]
    assert "EngineCore, killed by SIGKILL" in found["lost"][0]
    assert found["left"] == []
