"""Answer requests to a model, as plain data, on a worker: a batch job's tasks (batch/job_apps.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ctxflow.context import context
from ctxflow.errors import ItemRefused
from ctxflow.models.model_folder import check_ability, locate_model
from ctxflow.models.openai_contents import answers_missing, call_missing
from ctxflow.models.openai_engine import CHAT, COMPLETIONS
from ctxflow.models.openai_requests import COMPLETION_TOKENS
from ctxflow.models.openai_responses import RESPONSES
from ctxflow.models.results import InputTooLong, MissingPackageError, as_base64

if TYPE_CHECKING:
    from ctxflow.models.openai_engine import OpenAIEngine
    from ctxflow.models.reading import Tokens
    from ctxflow.models.vllm_serving import VLLMEngine

Request = Mapping[str, Any]
Answer = dict[str, Any]
Answers = Sequence[Answer | InputTooLong]
"""An answer for each request, or why it has none."""


async def respond(
    engine: OpenAIEngine, request: tuple[str, Request], *, parameters: Mapping[str, Any] = MappingProxyType({})
) -> Answer:
    """Have an engine answer one request of OpenAI's form; returns the response's body.

    :param request: an endpoint and a body.
    :param parameters: fields of a body that has none of its own.
    :raises ItemRefused: as `OpenAIEngine.answer`, and for an answer without the call of a tool that the body demands,
        or fewer answers than that.
    :raises ContextLost: as `OpenAIEngine.answer`.
    """
    endpoint, body = request
    endpoint = CHAT if endpoint == RESPONSES else endpoint  # Their bodies are those of chats already.
    answer = await engine.answer(endpoint, {**_missing(endpoint, body, parameters), **body})
    if (lacking := call_missing(body, answer) or answers_missing(body, answer)) is not None:
        raise ItemRefused(lacking)
    return answer


def _missing(endpoint: str, body: Request, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a body lacks; it may name the most tokens in two ways."""
    known = {"max_tokens", *body} if "max_completion_tokens" in body else body.keys()
    default = {"max_tokens": COMPLETION_TOKENS} if endpoint == COMPLETIONS else {}
    return {name: value for name, value in {**default, **parameters}.items() if name not in known}


_LIMITS = ("max_input_tokens", "too_long")


@context
async def request_engine(
    backend: str,
    model: str,
    *,
    command: str = "",
    task: str = "generate",
    adapters: Mapping[str, str] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> OpenAIEngine:
    """Build what answers requests of OpenAI's form.

    :param backend: "transformers", "vllm", or "server", which `command` starts.
    :param task: what it is for: "chat" takes a chat template.
    :param adapters: LoRA adapters: the name by which a request chooses one -> its folder, or the name of that among
        `settings` where it was staged.
    :param options: the engine's own.
    :param settings: how transformers, or vLLM, load the model.
    """
    if backend == "server":
        from ctxflow.models.openai_server import start_server

        server = await start_server(command, model=model, options=options)
        server.answers_any_name = True  # Files of requests were often written for other models.
        return server
    revision = options.get("revision") or settings.get("revision")
    check_ability(model, locate_model(model, revision=revision), task)
    if backend == "transformers":
        try:
            from ctxflow.models.transformers_serving import build_transformers_engine
        except ImportError as error:
            raise MissingPackageError.about("torch", "transformers", extra="transformers", why=error) from error
        return await build_transformers_engine(model, **settings, **options)
    from ctxflow.models.vllm_serving import VLLMEngine

    limits = {name: settings.pop(name, None) for name in _LIMITS}
    folders = {name: settings.pop(path, path) for name, path in adapters.items()}
    built = await VLLMEngine.start(model, adapters=folders, options=options, **settings)
    if limits.get("max_input_tokens") is None and limits.get("too_long") in (None, "error"):
        return built
    return _shortening(built, model, options, limits)


def _shortening(engine: VLLMEngine, model: str, options: Mapping[str, Any], limits: Mapping[str, Any]) -> OpenAIEngine:
    """Return an engine that cuts inputs, in front of one that does not."""
    from transformers import AutoConfig, AutoTokenizer

    from ctxflow.models.reading import context_length
    from ctxflow.models.shortening import ShorteningEngine

    folder = locate_model(model, revision=options.get("revision"))
    trusted = {"trust_remote_code": True} if options.get("trust_remote_code") else {}
    length = engine.max_model_len or context_length(AutoConfig.from_pretrained(folder, **trusted))
    tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
    return ShorteningEngine(engine, tokenizer, length, **limits)


def embed(model: Any, requests: Sequence[Request]) -> Iterator[Answer | InputTooLong]:
    """Have an encoder turn texts into vectors; answers come as soon as the model gives them.

    :param requests: each with "input", a text or a list of texts, and maybe an "encoding_format".
    """
    lists = [[given] if isinstance(given := request["input"], str) else given for request in requests]
    each_read = iter(model.read([text for each in lists for text in each]))
    read = [[next(each_read) for _ in each] for each in lists]
    wrong = [next((each for each in row if isinstance(each, InputTooLong)), None) for row in read]
    good = [tokens for row, error in zip(read, wrong, strict=True) if error is None for tokens in row]
    vectors = iter(model.encode_each(good))
    for request, row, error in zip(requests, read, wrong, strict=True):
        if error is not None:
            yield error
            continue
        found = [next(vectors) for _ in row]
        packed = request.get("encoding_format") == "base64"
        yield {"embeddings": [as_base64(each) if packed else each.tolist() for each in found], **_read_of(row)}


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
