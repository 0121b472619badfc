"""How a job becomes an app: contexts, where models are, and what an engine is asked."""

import asyncio

import pytest

from ctxflow.batch.job import Job
from ctxflow.batch.job_apps import model_app
from ctxflow.models.answering import respond
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS


def job(**choices):
    return Job(**{"input": "in", "output": "out", "model": "some/model", **choices})


def inputs(app):
    """What a context's function gets, by name."""
    import inspect

    context = app.context
    return inspect.signature(context.function).bind_partial(*context.args, **context.kwargs).arguments


def test_a_name_is_resolved_by_workers_and_a_folder_is_named_in_full(tmp_path, monkeypatch):
    app, constants = model_app(job(seed=3), "generate", staged=True)
    assert inputs(app)["model"] == "some/model" and not app.context.files
    assert constants == {"parameters": {"max_tokens": 256, "temperature": 0, "seed": 3}}
    requests = job(seed=3, max_new_tokens=9, input_format="openai")
    assert model_app(requests, "generate", staged=True)[1] == {"parameters": {"max_tokens": 9, "seed": 3}}
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    app, _ = model_app(job(model="weights", task="embed"), "embed", staged=False)
    assert str(tmp_path / "weights") in app.context.args


@pytest.mark.parametrize("task", ["generate", "embed", "classify"])
def test_a_folder_is_sent_to_workers_that_do_not_share_the_disk(tmp_path, task):
    labels = ("a", "b") if task == "classify" else ()
    chosen = job(model=str(tmp_path), gpus=2, dtype="float32", label=labels, task=task)
    app, _ = model_app(chosen, task, staged=True)
    assert app.context.files == {"model": str(tmp_path)}
    assert app.context.gpus == 2
    assert {**app.context.kwargs, **app.context.kwargs.get("settings", {})}["dtype"] == "float32"


def test_vllm_gets_a_gpu_its_options_its_adapters_and_no_device(tmp_path):
    (tmp_path / "fr").mkdir()
    more = {"engine_options": {"max_model_len": 512}, "adapter": {"french": str(tmp_path / "fr"), "german": "/none"}}
    app, _ = model_app(job(backend="vllm", device="cuda", too_long="cut-end", **more), "generate", staged=True)
    assert app.context.kwargs["too_long"] == "cut-end"
    assert app.context.gpus == 1 and "device" not in app.context.kwargs
    assert app.context.kwargs["options"] == {"max_model_len": 512}
    assert app.context.kwargs["adapters"] == {"french": "adapter_0", "german": "/none"}
    assert app.context.files == {"adapter_0": str(tmp_path / "fr")}
    assert model_app(job(backend="vllm", gpus=0), "generate", staged=True)[0].context.gpus == 0


def test_a_servers_model_may_be_a_file_and_needs_no_gpu(tmp_path):
    (tmp_path / "tiny.gguf").touch()
    chosen = job(backend="server", server_command="llama-server", model=str(tmp_path / "tiny.gguf"), batch_size=3)
    app, _ = model_app(chosen, "generate", staged=True)
    assert app.context.files == {"model": str(tmp_path / "tiny.gguf")} and app.context.gpus == 0
    assert app.context.kwargs["command"] == "llama-server" and app.context.concurrency == 3


class Recorder:
    """Stands where an engine would: answers with what it was asked."""

    async def answer(self, endpoint, body):
        return {"endpoint": endpoint, **body}


def asked(endpoint, body, **parameters):
    return asyncio.run(respond(Recorder(), (endpoint, body), parameters=parameters))


def test_a_request_that_says_nothing_gets_the_jobs_parameters():
    own = {"max_tokens": 256, "temperature": 0}
    assert asked(COMPLETIONS, {"prompt": "a"}, **own) == {"endpoint": COMPLETIONS, "prompt": "a", **own}
    chosen = {"messages": [], "max_completion_tokens": 5, "temperature": 0.5}
    assert asked(CHAT, chosen, max_tokens=256, temperature=0.7) == {"endpoint": CHAT, **chosen}
    assert asked(EMBEDDINGS, {"input": "a"}) == {"endpoint": EMBEDDINGS, "input": "a"}


def test_a_request_for_which_nobody_says_anything_is_left_to_the_engine_but_a_completion_ends_as_openai_has_it():
    assert asked(CHAT, {"messages": [], "n": 3}) == {"endpoint": CHAT, "messages": [], "n": 3}
    assert asked(COMPLETIONS, {"prompt": "a"}) == {"endpoint": COMPLETIONS, "prompt": "a", "max_tokens": 16}
    assert asked(COMPLETIONS, {"prompt": "a", "max_tokens": 3})["max_tokens"] == 3
