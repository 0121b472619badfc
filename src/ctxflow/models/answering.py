"""Answer a batch of requests to a model, as plain data, on a worker: a batch job's tasks (batch/job_apps.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.context import context
from ctxflow.models.results import GENERATION, InputTooLong, Sampling

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
    """Return what a model read of the texts of a row, together."""
    read, truncated = sum(len(tokens.ids) for tokens in texts), any(tokens.truncated for tokens in texts)
    original = sum(tokens.original or len(tokens.ids) for tokens in texts)
    return {"prompt_tokens": read, "truncated": truncated, "original_prompt_tokens": original if truncated else None}


def classify(model: Any, requests: Sequence[Request]) -> Answers:
    """Have a classifier choose a label for each "prompt"."""
    return model.choose([request["prompt"] for request in requests])  # type: ignore[no-any-return]


@context
def label_chooser(model: str, labels: Sequence[str], **settings: Any) -> Any:
    """Build what chooses among labels: by likelihood for a language model, by similarity for a sentence encoder."""
    from ctxflow.models.model_folder import locate_model

    folder = locate_model(model)
    return (_Nearest if (folder / "modules.json").is_file() else _Likeliest)(model, labels, settings)


class _Likeliest:
    """A language model; scores are probabilities that sum to one."""

    def __init__(self, model: str, labels: Sequence[str], settings: Mapping[str, Any]) -> None:
        from ctxflow.models import LabelClassifier

        self._model = LabelClassifier(model, labels=labels, **settings)

    def choose(self, texts: Sequence[str]) -> Answers:
        """Return the label that the model finds likeliest after each text."""
        answers = self._model.classify(texts, on_error="return")
        return [each if isinstance(each, InputTooLong) else self._answer(each) for each in answers]

    def _answer(self, chosen: Any) -> Answer:
        read = {name: getattr(chosen, name) for name in ("prompt_tokens", "truncated", "original_prompt_tokens")}
        return {"label": chosen.label, "scores": chosen.probabilities, **read}


class _Nearest:
    """A sentence encoder; scores are cosines."""

    def __init__(self, model: str, labels: Sequence[str], settings: Mapping[str, Any]) -> None:
        from ctxflow.models import SentenceEncoder

        self._model = SentenceEncoder(model, **settings)
        self._labels = list(labels)
        self._vectors = _unit(self._model.encode(self._labels))

    def choose(self, texts: Sequence[str]) -> Answers:
        """Return the label whose vector is nearest to that of each text."""
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
