"""How a job becomes an app: contexts, where models are, functions."""

import pytest

from ctxflow.batch.job import Job
from ctxflow.batch.job_apps import model_app
from ctxflow.models import Generation
from ctxflow.models.answering import generate


def job(**choices):
    return Job(**{"input": "in", "output": "out", "model": "some/model", **choices})


def test_a_name_is_resolved_by_workers_and_a_folder_is_named_in_full(tmp_path, monkeypatch):
    app, constants = model_app(job(seed=3), "generate", staged=True)
    assert "some/model" in app.context.args and not app.context.files
    assert constants == {"parameters": {"seed": 3}}
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    app, _ = model_app(job(model="weights"), "embed", staged=False)
    assert str(tmp_path / "weights") in app.context.args


@pytest.mark.parametrize("family", ["generate", "embed", "classify"])
def test_a_folder_is_sent_to_workers_that_do_not_share_the_disk(tmp_path, family):
    chosen = job(model=str(tmp_path), gpus=2, dtype="float32", label=("a", "b"), task="classify")
    app, _ = model_app(chosen, family, staged=True)
    assert app.context.files == {"model": str(tmp_path)}
    assert app.context.gpus == 2
    assert app.context.kwargs["dtype"] == "float32"


def test_vllm_gets_a_gpu_and_no_device():
    app, _ = model_app(job(backend="vllm", device="cuda"), "generate", staged=False)
    assert (app.context.name, app.context.gpus, "device" in app.context.kwargs) == ("vllm_generator", 1, False)


class Recorder:
    """Stands where a model would: answers with what it was asked."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, **parameters):
        self.calls.append(("generate", prompts, parameters))
        return [Generation(prompt, 1, 1, "stop") for prompt in prompts]

    def chat(self, conversations, **parameters):
        self.calls.append(("chat", conversations, parameters))
        return [Generation(conversation[0]["content"], 1, 1, "stop") for conversation in conversations]


class OneByOne(Recorder):
    """Answers only as far as it is asked."""

    def __init__(self):
        super().__init__()
        self.given = []

    def generate_each(self, prompts, **parameters):
        for answer in self.generate(prompts, **parameters):
            self.given.append(answer.text)
            yield answer

    def chat_each(self, conversations, **parameters):
        yield from self.chat(conversations, **parameters)


def test_answers_come_as_soon_as_the_model_gives_them():
    model = OneByOne()
    requests = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    answers = generate(model, requests, parameters={})
    assert next(answers)["text"] == "a"
    assert model.given == ["a"]
    assert [answer["text"] for answer in answers] == ["b", "c"]


def test_prompts_and_conversations_share_a_batch_and_keep_their_places():
    model = Recorder()
    requests = [
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "b"}], "seed": 5},
        {"prompt": "c", "stop": ["x"], "max_new_tokens": 2},
        {"messages": [{"role": "user", "content": "d"}]},
    ]
    answers = generate(model, requests, parameters={"seed": 1, "stop": ("y",)})
    assert [answer["text"] for answer in answers] == ["a", "b", "c", "d"]
    (_, prompts, first), (_, _, second) = model.calls
    assert prompts == ["a", "c"]
    assert first == {"seed": 1, "stop": [["y"], ["x"]], "max_new_tokens": [256, 2], "on_error": "return"}
    assert second == {"seed": [5, 1], "stop": ("y",), "on_error": "return"}
