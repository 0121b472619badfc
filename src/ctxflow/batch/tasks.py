"""What workers do with a batch of a model's requests, and the apps and contexts that have them do it.

Requests and answers are plain data. What does not live here: how a row becomes a request (requests.py), and how
an answer becomes a line (records.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxflow.apps import BatchApp, ContextApp
from ctxflow.batch.job import GENERATION, Job
from ctxflow.context import Context, ContextFunction, context
from ctxflow.decorators import batch_app
from ctxflow.models import encoder, generator, vllm_generator
from ctxflow.models.errors import InputTooLong
from ctxflow.rows.columns import closest
from ctxflow.sessions import SessionApp
from ctxflow.wording import article

if TYPE_CHECKING:
    from ctxflow.models.reading import Tokens

Request = Mapping[str, Any]
Answer = dict[str, Any]
Answers = Sequence[Answer | InputTooLong]
"""An answer for each request, or why it has none."""


def generate(
    model: Any, requests: Sequence[Request], *, parameters: Mapping[str, Any]
) -> Iterator[Answer | InputTooLong]:
    """Have a generator continue prompts and answer conversations; answers come as soon as the model gives them.

    A request that is too long is answered by its error, so that those beside it need not run again without it.

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
        given = {**parameters, **columns}
        written[kind] = iter(write([request[kind] for request in chosen], on_error="return", **given))
    for request in requests:
        answer = next(written["messages" if "messages" in request else "prompt"])
        yield answer if isinstance(answer, InputTooLong) else dataclasses.asdict(answer)


def _default(name: str, parameters: Mapping[str, Any]) -> Any:
    from ctxflow.models.sampling import Sampling

    return list(parameters.get(name, ())) if name == "stop" else parameters.get(name, getattr(Sampling(), name))


def embed(model: Any, requests: Sequence[Request]) -> Answers:
    """Have an encoder turn texts into vectors.

    :param requests: each with "input", a text or a list of texts.
    """
    lists = [[given] if isinstance(given := request["input"], str) else given for request in requests]
    each_read = iter(model.read([text for each in lists for text in each]))
    read = [[next(each_read) for _ in each] for each in lists]
    wrong = [next((each for each in row if isinstance(each, InputTooLong)), None) for row in read]
    good = [tokens for row, error in zip(read, wrong, strict=True) if error is None for tokens in row]
    vectors = iter(model.encode_tokens(good).tolist())
    return [
        error if error is not None else {"embeddings": [next(vectors) for _ in row], **_read_of(row)}
        for row, error in zip(read, wrong, strict=True)
    ]


def _read_of(texts: Sequence[Tokens]) -> Answer:
    """What a model read of the texts of a row, together."""
    read, truncated = sum(len(tokens.ids) for tokens in texts), any(tokens.truncated for tokens in texts)
    original = sum(tokens.original or len(tokens.ids) for tokens in texts)
    return {"prompt_tokens": read, "truncated": truncated, "original_prompt_tokens": original if truncated else None}


def classify(model: Any, requests: Sequence[Request]) -> Answers:
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

    def choose(self, texts: Sequence[str]) -> Answers:
        """The label that the model finds likeliest after each text."""
        return [
            each
            if isinstance(each, InputTooLong)
            else {
                "label": each.label,
                "scores": each.probabilities,
                "prompt_tokens": each.prompt_tokens,
                "truncated": each.truncated,
                "original_prompt_tokens": each.original_prompt_tokens,
            }
            for each in self._model.classify(texts, on_error="return")
        ]


class _Nearest:
    """A sentence encoder; scores are cosines."""

    def __init__(self, model: str, labels: Sequence[str], settings: Mapping[str, Any]) -> None:
        from ctxflow.models import SentenceEncoder

        self._model = SentenceEncoder(model, **settings)
        self._labels = list(labels)
        self._vectors = _unit(self._model.encode(self._labels))

    def choose(self, texts: Sequence[str]) -> Answers:
        """The label whose vector is nearest to that of each text."""
        read = self._model.read(texts)
        good = [tokens for tokens in read if not isinstance(tokens, InputTooLong)]
        scores = iter((_unit(self._model.encode_tokens(good)) @ self._vectors.T).tolist())
        return [
            tokens if isinstance(tokens, InputTooLong) else {**self._nearest(next(scores)), **_read_of([tokens])}
            for tokens in read
        ]

    def _nearest(self, row: list[float]) -> Answer:
        return {"label": self._labels[row.index(max(row))], "scores": dict(zip(self._labels, row, strict=True))}


def _unit(vectors: Any) -> Any:
    import numpy as np

    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def model_app(job: Job, family: str, staged: bool) -> tuple[BatchApp, dict[str, Any]]:
    """The app that does a job's task, and its constants.

    :param family: "generate" (which answers conversations too), "embed" or "classify".
    :param staged: whether workers get a model's folder sent, since they do not share this machine's disk.
    """
    names = ("dtype", "max_input_tokens", "too_long", *(() if job.backend == "vllm" else ("device",)))
    inputs: dict[str, Any] = {name: value for name in names if (value := getattr(job, name)) is not None}
    options: dict[str, Any] = {} if job.gpus is None else {"gpus": job.gpus}
    folder = Path(job.model or "").expanduser()
    if folder.is_dir() and staged:
        options["files"] = {"model": str(folder.absolute())}
    else:
        inputs["model"] = str(folder.absolute()) if folder.is_dir() else job.model
    if family == "embed":
        return _app(job, embed, encoder.options(**options)(**inputs)), {}
    if family == "classify":
        return _app(job, classify, label_chooser.options(**options)(labels=tuple(job.label), **inputs)), {}
    if job.task == "chat":
        inputs["task"] = "chat"
    recipe = (vllm_generator if job.backend == "vllm" else generator).options(**options)(**inputs)
    return _app(job, generate, recipe), {"parameters": job.parameters}


def _app(job: Job, function: Any, recipe: Any) -> BatchApp:
    options: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries}
    app: BatchApp = batch_app(recipe, **options)(function)
    return app


def function_app(job: Job) -> BatchApp:
    """The user's own batch app that a job names, or a function made one.

    :raises ValueError: if there is none of that name, or it is something else; its module may raise what it likes.
    """
    found = _found(str(job.function))
    if not isinstance(found, BatchApp):
        if (sentence := _no_function(found)) is not None:
            raise ValueError(f"{job.function} is {sentence}")
        try:
            found = batch_app(found)
        except TypeError as error:
            raise ValueError(f"{job.function} cannot be taken: {error}") from None
    changes: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries or None}
    changed: BatchApp = found.using(**{name: value for name, value in changes.items() if value is not None})
    return changed


def _found(named: str) -> Any:
    """What is called MODULE:NAME."""
    module, _, name = named.partition(":")
    if not name or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        hint = f" (without folders and .py: {Path(module).stem}:{name or 'name'})" if module.endswith(".py") else ""
        raise ValueError(f"the function {named!r} is to be named as module:name, such as my_prompts:summarise{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"the module {module} needs {error.name!r}, which is not installed here") from None
        raise ValueError(f"the function {named} is not found ({error}): run this where {module}.py is") from None
    except (Exception, SystemExit) as error:  # It is a program: it raises what it likes.
        raise ValueError(f"the module {module} fails when it is imported: {_raised(error, module)}") from None
    try:
        return getattr(loaded, name)
    except AttributeError:
        close = closest(name, [each for each in vars(loaded) if not each.startswith("_")])
        hint = f": did you mean {close!r}?" if close else ""
        raise ValueError(f"the module {module} has nothing called {name!r}{hint}") from None


def _raised(error: BaseException, module: str) -> str:
    """An error of a module's, with the line that it goes back to."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).stem == module.rpartition(".")[2]]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _no_function(found: Any) -> str | None:
    """What something is that is neither a batch app nor a function, and what to write."""
    if isinstance(found, ContextApp):
        return "a context_app, which takes one call at a time: make it a batch_app, a function over lists"
    if isinstance(found, SessionApp):
        return "a session_app, whose sessions are opened in Python: make it a batch_app, a function over lists"
    if isinstance(found, (Context, ContextFunction)):
        return "a context, not a function: name a batch_app that uses it"
    if not callable(found) or isinstance(found, type):
        kind = "a class" if isinstance(found, type) else article(type(found).__name__)
        return f"{kind}, not a function or a batch app"
    return None
