"""What workers do with a batch of a model's requests, and the apps and contexts that have them do it.

Requests and answers are plain data. What does not live here: how a row becomes a request (requests.py), and how
an answer becomes a line (records.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.job import GENERATION, Job
from ctxflow.context import context
from ctxflow.decorators import batch_app
from ctxflow.models import encoder, generator, vllm_generator

Request = Mapping[str, Any]
Answer = dict[str, Any]


def generate(model: Any, requests: Sequence[Request], *, parameters: Mapping[str, Any]) -> Iterator[Answer]:
    """Have a generator continue prompts and answer conversations; answers come as soon as the model gives them.

    :param requests: with "prompt" or "messages", and generation parameters of their own.
    :param parameters: the generation parameters of requests that have none of their own.
    """
    written: dict[str, Iterator[Any]] = {}
    for kind, name in (("prompt", "generate"), ("messages", "chat")):
        chosen = [request for request in requests if kind in request]
        if not chosen:
            continue
        write = getattr(model, f"{name}_each", None) or getattr(model, name)
        own = [name for name in GENERATION if any(name in request for request in chosen)]
        columns = {name: [request.get(name, _default(name, parameters)) for request in chosen] for name in own}
        written[kind] = iter(write([request[kind] for request in chosen], **{**parameters, **columns}))
    for request in requests:
        answer = next(written["messages" if "messages" in request else "prompt"])
        yield {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "truncated": answer.truncated,
        }


def _default(name: str, parameters: Mapping[str, Any]) -> Any:
    from ctxflow.models.sampling import Sampling

    return list(parameters.get(name, ())) if name == "stop" else parameters.get(name, getattr(Sampling(), name))


def embed(model: Any, requests: Sequence[Request], *, count: bool) -> list[Answer]:
    """Have an encoder turn texts into vectors.

    :param requests: each with "input", a text or a list of texts.
    :param count: whether to count tokens.
    """
    lists = [[given] if isinstance(given := request["input"], str) else given for request in requests]
    texts = [text for each in lists for text in each]
    vectors = iter(model.encode(texts).tolist())
    tokens = iter(model.count_tokens(texts) if count else [0] * len(texts))
    return [
        {"embeddings": [next(vectors) for _ in each], "prompt_tokens": sum(next(tokens) for _ in each)}
        for each in lists
    ]


def classify(model: Any, requests: Sequence[Request]) -> list[Answer]:
    """Have a classifier choose a label for each "prompt"."""
    return model.choose([request["prompt"] for request in requests])  # type: ignore[no-any-return]


@context
def label_chooser(model: str, labels: Sequence[str], **settings: Any) -> Any:
    """Something that chooses among labels: by likelihood for a language model, by likeness for a sentence encoder."""
    from ctxflow.models.locate import locate_model

    folder = locate_model(model)
    return (_Nearest if (folder / "modules.json").is_file() else _Likeliest)(model, labels, settings)


class _Likeliest:
    """A language model; scores are probabilities that sum to one."""

    def __init__(self, model: str, labels: Sequence[str], settings: Mapping[str, Any]) -> None:
        from ctxflow.models import LabelClassifier

        self._model = LabelClassifier(model, labels=labels, **settings)

    def choose(self, texts: Sequence[str]) -> list[Answer]:
        """The label that the model finds likeliest after each text."""
        return [{"label": each.label, "scores": each.probabilities} for each in self._model.classify(texts)]


class _Nearest:
    """A sentence encoder; scores are cosines."""

    def __init__(self, model: str, labels: Sequence[str], settings: Mapping[str, Any]) -> None:
        from ctxflow.models import SentenceEncoder

        self._model = SentenceEncoder(model, **settings)
        self._labels = list(labels)
        self._vectors = _unit(self._model.encode(self._labels))

    def choose(self, texts: Sequence[str]) -> list[Answer]:
        """The label whose vector is nearest to that of each text."""
        scores = (_unit(self._model.encode(texts)) @ self._vectors.T).tolist()
        return [
            {"label": self._labels[row.index(max(row))], "scores": dict(zip(self._labels, row, strict=True))}
            for row in scores
        ]


def _unit(vectors: Any) -> Any:
    import numpy as np

    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def model_app(job: Job, family: str, count: bool, staged: bool) -> tuple[BatchApp, dict[str, Any]]:
    """The app that does a job's task, and its constants.

    :param family: "generate" (which answers conversations too), "embed" or "classify".
    :param count: whether an embedding's tokens are to be counted.
    :param staged: whether workers get a model's folder sent, since they do not share this machine's disk.
    """
    names = ("dtype", "max_input_tokens") if job.backend == "vllm" else ("dtype", "device", "max_input_tokens")
    inputs: dict[str, Any] = {name: value for name in names if (value := getattr(job, name)) is not None}
    options: dict[str, Any] = {} if job.gpus is None else {"gpus": job.gpus}
    folder = Path(job.model or "").expanduser()
    if folder.is_dir() and staged:
        options["files"] = {"model": str(folder.absolute())}
    else:
        inputs["model"] = str(folder.absolute()) if folder.is_dir() else job.model
    if family == "embed":
        return _app(job, embed, encoder.options(**options)(**inputs)), {"count": count}
    if family == "classify":
        return _app(job, classify, label_chooser.options(**options)(labels=tuple(job.label), **inputs)), {}
    recipe = (vllm_generator if job.backend == "vllm" else generator).options(**options)(**inputs)
    return _app(job, generate, recipe), {"parameters": job.parameters}


def _app(job: Job, function: Any, recipe: Any) -> BatchApp:
    options: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries}
    app: BatchApp = batch_app(recipe, **options)(function)
    return app


def function_app(job: Job) -> BatchApp:
    """The user's own batch app that a job names, or a function made one.

    :raises ValueError: if there is none of that name.
    """
    module, _, name = (job.function or "").partition(":")
    if not name:
        raise ValueError(f"the function {module!r} is named as module:name, such as my_prompts:summarise")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"the function {job.function} is not found ({error}): run this where {module}.py is") from None
    except AttributeError:
        raise ValueError(f"the module {module} has nothing called {name!r}") from None
    if not isinstance(found, BatchApp):
        if not callable(found):
            raise ValueError(f"{job.function} is a {type(found).__name__}, not a function or a batch app")
        found = batch_app(found)
    changes: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries or None}
    changed: BatchApp = found.using(**{name: value for name, value in changes.items() if value is not None})
    return changed
