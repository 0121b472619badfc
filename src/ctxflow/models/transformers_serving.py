"""An engine of OpenAI's form by transformers: requests enter a running batch at once, and are answered as they end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.errors import ItemRefused
from ctxflow.models.batch_thread import BatchThread
from ctxflow.models.constraints import Grammars
from ctxflow.models.encode import SentenceEncoder
from ctxflow.models.generate import batch_of, generation
from ctxflow.models.model_folder import locate_model
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, aside
from ctxflow.models.openai_requests import (
    COMPLETION_TOKENS,
    TURNING_OFF,
    as_sent,
    logprobs_problem,
    longest_logged,
    refusal,
)
from ctxflow.models.padded_batches import PaddedBatches
from ctxflow.models.reading import Read, Reader, Tokens, context_length, tokenize
from ctxflow.models.results import RANGES, Generation, InputTooLong, Sampling, as_base64
from ctxflow.models.running_batch import RunningRow, end_tokens
from ctxflow.models.transformers import LoadedModel, load_language_model

_NO_END = 2**17  # Tokens of a context whose model says of no end.
_MANY = 2_000  # Tokens, which take some hundredths of a second to be written out.
_LIKELY = 256  # Tokens for which an answer has room at first, where it may go on to the context's end.
OTHERS = "run it with --backend vllm or --backend server"


class TransformersEngine:
    """A causal language model, or a sentence encoder, that answers requests of OpenAI's form (`OpenAIEngine`).

    An answer depends neither on the requests beside it nor on when it came. A request's tokens are chosen by `seed` and
    prompt alone, as `TextGenerator`'s; of `n` answers the k-th has the seed `seed` + k. Without `max_tokens` a chat may
    go on to the context's end, and a completion for 16 tokens; without `temperature` and the like those of the model's
    generation settings hold, else 1: as OpenAI's and vLLM's.

    :param model: a folder, `package:NAME` or a hub id (`ctxflow.models.model_folder`), or a language model already
        loaded. A folder of sentence-transformers (with a modules.json) is an encoder, and answers /v1/embeddings alone.
    :param name: what answers call the model; by default as it was asked for.
    :param max_batch_tokens, max_batch_size, max_input_tokens, too_long: as `TextGenerator`, `SentenceEncoder`.
    :param loading: as `TextGenerator`, `SentenceEncoder`.

    >>> import asyncio, tempfile
    >>> from ctxflow.testing.small_models import make_causal_lm
    >>> async def ask(folder):
    ...     engine = await build_transformers_engine(folder, device="cpu")
    ...     body = {"prompt": "Twice two is", "max_tokens": 3, "temperature": 0}
    ...     answer = await engine.answer("/v1/completions", body)
    ...     await engine.aclose()
    ...     return answer["usage"]["completion_tokens"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(ask(make_causal_lm(folder)))
    3
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        name: str | None = None,
        max_batch_tokens: int | None = None,
        max_batch_size: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        **loading: Any,
    ) -> None:
        limits = max_batch_tokens, max_batch_size
        self._encoder: SentenceEncoder | None = None
        if not isinstance(model, LoadedModel) and _is_encoder(model, loading.get("revision")):
            self._encoder = SentenceEncoder(
                model,
                max_batch_tokens=max_batch_tokens,
                max_batch_size=max_batch_size,
                max_input_tokens=max_input_tokens,
                too_long=too_long,
                **loading,
            )
            self._loaded = self._encoder.loaded
            batch: Any = _Encoding(self._encoder)
        else:
            self._loaded = model if isinstance(model, LoadedModel) else load_language_model(model, **loading)
            batch = batch_of(self._loaded, *limits)
            config = self._loaded.model.config
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            size = int(getattr(text, "vocab_size", 0) or 0)
            self._length = context_length(config) or _NO_END
            self._settings = _own_settings(self._loaded.model.generation_config)
            self._reader = Reader(self._loaded.tokenizer, self._length, max_input_tokens, too_long)
            self._grammars = Grammars(self._loaded.tokenizer, size, end_tokens(self._loaded))
        self._padded = isinstance(batch, PaddedBatches)
        self._name = name or self._loaded.name
        self._tokenizer = self._loaded.tokenizer  # Which stays when the model is closed.
        self._thread = BatchThread(batch, self._loaded.close)

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request, as `OpenAIEngine.answer` says."""
        self._thread.check()
        if endpoint not in ENDPOINTS:
            raise ItemRefused(f"the endpoint {endpoint!r} is not answered: there are {', '.join(ENDPOINTS)}")
        if (self._encoder is not None) != (endpoint == EMBEDDINGS):
            kind = "a sentence encoder" if self._encoder is not None else "a language model"
            raise ItemRefused(f"{self._name} is {kind}, which does not answer {endpoint}: give a model that does")
        if (wrong := await aside(body, lambda: refusal(endpoint, body, "transformers"))) is not None:
            raise ItemRefused(wrong)
        sent = as_sent(endpoint, body, "transformers")
        if self._encoder is not None:
            return await self._embed(self._encoder, sent)
        rows, prompt = await self._rows(endpoint, sent)
        try:
            await self._thread.done(rows)
        except ItemRefused:
            raise
        except ValueError as error:  # What binds its answer grew too complex.
            raise ItemRefused(f"{error}: change what binds the answer, or {OTHERS}") from error
        make = self._chat_choice if endpoint == CHAT else self._text_choice
        written = sum(len(row.written) for row in rows)

        def made() -> list[Any]:
            return [make(number, row, generation(self._tokenizer, row, prompt)) for number, row in enumerate(rows)]

        choices = made() if written < _MANY else await asyncio.to_thread(made)
        return self._response(endpoint, choices, prompt, written)

    async def aclose(self) -> None:
        """End the thread and free the model; requests in flight end with `ContextLost`. Again: nothing."""
        await self._thread.stop()

    async def _rows(self, endpoint: str, body: Mapping[str, Any]) -> tuple[list[RunningRow], Tokens]:
        """Return the rows of a request, and what is read of it."""
        try:
            asked = _most_tokens(endpoint, body)
            prompt = await aside(body, lambda: self._read(endpoint, body, self._reader.reserved(asked)))
            if isinstance(prompt, InputTooLong):
                raise prompt
            own = {"max_new_tokens": self._length, **self._settings}
            most = asked or min(self._length - len(prompt.ids), own["max_new_tokens"], longest_logged(body))
            sampling = _sampling({**own, **body}, most)
            if endpoint == CHAT:
                sampling = sampling.stopping_at(self._reader.chat_stops)
            if (wrong := logprobs_problem(body, most * body.get("n", 1))) is not None:
                raise ItemRefused(wrong)
            self._loaded.check_tokens(prompt.ids, "the prompt")
            # Compiled before anything waits, so that a wrong one is told at once.
            constraints = await self._constraints(body, body.get("n", 1))
        except ItemRefused:
            raise
        except (ValueError, TypeError) as error:
            raise ItemRefused(str(error)) from error
        top = _top(endpoint, body)
        if self._padded and (top is not None or constraints[0] is not None):
            what = "log-probabilities" if top is not None else "what binds its answer"
            raise ItemRefused(f"{what} cannot be had of {self._name} with the backend transformers: {OTHERS}")
        off = TURNING_OFF.intersection(body)
        rows = []
        for number, constraint in enumerate(constraints):
            seed = None if sampling.seed is None else sampling.seed + number
            drawn = dataclasses.replace(sampling, seed=seed)
            rows.append(RunningRow(prompt.ids, drawn, constraint, top, off, None if asked else _LIKELY))
        return rows, prompt

    def _read(self, endpoint: str, body: Mapping[str, Any], reserved: int) -> Read:
        rooms = [self._reader.room(reserved, "max_tokens")]
        if endpoint == COMPLETIONS:
            [read] = self._reader.texts(tokenize(self._tokenizer, [body["prompt"]]), rooms)
        else:
            options = {**body.get("chat_template_kwargs", {})}
            if body.get("tools"):
                options["tools"] = body["tools"]
            [read] = self._reader.conversations([body["messages"]], rooms, options)
        return read

    async def _constraints(self, body: Mapping[str, Any], count: int) -> Sequence[Any]:
        wanted = dict(body.get("structured_outputs") or {})
        shape = body.get("response_format") or {}
        if shape.get("type") == "json_schema":
            wanted["json"] = shape["json_schema"]["schema"]
        elif shape.get("type") == "json_object":
            wanted["json_object"] = True
        if not wanted:
            return [None] * count
        [(kind, value)] = wanted.items()
        try:
            return await self._grammars.constraints(kind, value, count)
        except ValueError as error:
            raise ValueError(f"the request's {kind} cannot be used ({error}): change it, or {OTHERS}") from error

    async def _embed(self, encoder: SentenceEncoder, body: Mapping[str, Any]) -> dict[str, Any]:
        given = body["input"]
        read = await aside(body, lambda: encoder.read([given] if isinstance(given, str) else given))
        wrong = next((each for each in read if isinstance(each, InputTooLong)), None)
        if wrong is not None:
            raise ItemRefused(str(wrong)) from wrong
        rows = [_Text(tokens) for tokens in read if isinstance(tokens, Tokens)]
        for row in rows:
            self._loaded.check_tokens(row.tokens.ids, "the text")
        await self._thread.done(rows)
        form = as_base64 if body.get("encoding_format") == "base64" else list
        vectors = [form(row.vector or []) for row in rows]
        data = [{"object": "embedding", "index": number, "embedding": each} for number, each in enumerate(vectors)]
        tokens = sum(len(row.tokens.ids) for row in rows)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._name, "usage": usage}

    def _response(self, endpoint: str, choices: list[Any], prompt: Tokens, written: int) -> dict[str, Any]:
        chat, read = endpoint == CHAT, len(prompt.ids)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": choices,
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            **({"truncated": True, "original_prompt_tokens": prompt.original} if prompt.truncated else {}),
        }

    def _chat_choice(self, number: int, row: RunningRow, answer: Generation) -> dict[str, Any]:
        logprobs = None
        if row.top is not None:
            content = [
                {**self._token(token, value), "top_logprobs": [self._token(*each) for each in best]}
                for token, (value, best) in zip(row.written, row.logprobs, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _text_choice(self, number: int, row: RunningRow, answer: Generation) -> dict[str, Any]:
        logprobs = None
        if row.top is not None:
            tokens = [self._text(token) for token in row.written]
            offsets = [0]
            for token in tokens[:-1]:
                offsets.append(offsets[-1] + len(token))
            best = [{self._text(token): value for token, value in best} for _, best in row.logprobs]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [value for value, _ in row.logprobs],
                "top_logprobs": best if row.top else None,
                "text_offset": offsets[: len(tokens)],
            }
        return {"index": number, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(token_bytes(self._tokenizer, token, text))}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))


async def build_transformers_engine(model: str | os.PathLike[str] | LoadedModel, **settings: Any) -> TransformersEngine:
    """Build a `TransformersEngine`, in a thread, so that the event loop goes on meanwhile.

    :param settings: of `TransformersEngine`; errors as its and as `load_language_model`'s.
    """
    return await asyncio.to_thread(TransformersEngine, model, **settings)


def _is_encoder(model: str | os.PathLike[str], revision: str | None) -> bool:
    return (locate_model(model, revision=revision) / "modules.json").is_file()


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return a token's bytes, of which a client makes the characters that several tokens share.

    :param text: of the token alone, where a part of a character is U+FFFD.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" not in text or not isinstance(name, str):
        return text.encode()
    if whole := re.fullmatch("<0x([0-9A-F]{2})>", name):  # A single byte, as SentencePiece writes it.
        return bytes.fromhex(whole[1])
    known = _byte_of_character()
    # Tokenizers of bytes write each as a character of its own.
    return bytes(known[each] for each in name) if all(each in known for each in name) else text.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _own_settings(settings: Any) -> dict[str, Any]:
    """Return what a model's generation settings say of sampling, beyond the library's own defaults."""
    said = settings.to_diff_dict()
    found = {name: said.get(name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
    return {name: each for name, each in found.items() if each is not None and RANGES[name].holds(each)}


def _most_tokens(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Return how many tokens an answer may have, None for all that fit."""
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    return limits[0] if limits else COMPLETION_TOKENS if endpoint == COMPLETIONS else None


def _sampling(body: Mapping[str, Any], most: int) -> Sampling:
    stop = body.get("stop") or ()
    return Sampling(
        max_new_tokens=most,
        temperature=body.get("temperature", 1.0),
        top_p=body.get("top_p", 1.0),
        top_k=max(body.get("top_k", 0), 0),
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _top(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Return how many of the likeliest tokens' log-probabilities are asked for, None for none at all."""
    asked = body.get("logprobs")
    if endpoint == CHAT:
        return int(body.get("top_logprobs") or 0) if asked else None
    return None if asked is None or asked is False else int(asked)


@dataclasses.dataclass(eq=False)
class _Text:
    """A text that is to become a vector."""

    tokens: Tokens
    vector: list[float] | None = None
    error: BaseException | None = None


class _Encoding:
    """Texts that wait to be encoded, as the batch of a `BatchThread`."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder = encoder
        self._waiting: list[_Text] = []

    @property
    def idle(self) -> bool:
        return not self._waiting

    def add(self, row: _Text) -> None:
        self._waiting.append(row)

    def remove(self, row: _Text) -> None:
        if row in self._waiting:
            self._waiting.remove(row)

    def step(self) -> Sequence[_Text]:
        """Encode an internal batch of those that wait, the oldest among them."""
        chosen = self._encoder.next_batch([len(row.tokens.ids) for row in self._waiting])
        rows = [self._waiting[number] for number in chosen]
        gone = set(chosen)
        self._waiting = [row for number, row in enumerate(self._waiting) if number not in gone]
        try:
            vectors = self._encoder.encode_tokens([row.tokens for row in rows]).tolist()
        except MemoryError:  # One of them did not fit alone.
            for row in rows:
                self._encode_alone(row)
            return rows
        for row, vector in zip(rows, vectors, strict=True):
            row.vector = vector
        return rows

    def _encode_alone(self, row: _Text) -> None:
        try:
            [row.vector] = self._encoder.encode_tokens([row.tokens]).tolist()
        except MemoryError as error:
            row.error = error
