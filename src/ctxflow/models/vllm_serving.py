"""vLLM in the library process, asked in OpenAI's form: the classes with which `vllm serve` answers, without HTTP."""

from __future__ import annotations

import argparse
import json
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxflow.errors import ContextLost, ItemRefused, closest, short
from ctxflow.host.private_shm import one_path
from ctxflow.models.model_folder import locate_model
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, aside
from ctxflow.models.openai_requests import MOST_TOKENS, as_sent, longest_logged, refusal
from ctxflow.models.results import ModelNotFoundError
from ctxflow.models.vllm import spread
from ctxflow.models.vllm_options import check_vllm_options, memory_share, parse_options, plain_names
from ctxflow.models.vllm_process import VLLMProcesses
from ctxflow.models.weight_reading import vllm_loader

_NOWHERE = "no-address-was-allowed.invalid"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ADAPTERS_AT_ONCE = 4
_FEW = 8


class VLLMEngine:
    """A model in vLLM that answers requests of OpenAI's form, as `ctxflow.models.openai_engine.OpenAIEngine` says.

    Requests mean what they mean to `vllm serve`: chat templates, `response_format` and `structured_outputs`,
    `logprobs`, `n`, `tools`, reasoning, images as data URLs. What `ctxflow.models.openai_requests.refusal` has
    something against is refused: no request has it read files, fetch addresses or load anything.

    `await VLLMEngine.start(...)` makes one.

    :ivar max_model_len: tokens to read and write together at most, as its options say; None where these leave it to the
        model.
    """

    def __init__(
        self,
        processes: VLLMProcesses,
        state: Any,
        names: tuple[str, ...],
        adapters: tuple[str, ...],
        max_model_len: int | None = None,
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
        from vllm.entrypoints.serve import create_error_response

        self._processes, self._names, self._adapters = processes, names, adapters
        self.max_model_len = max_model_len if (max_model_len or 0) > 0 else None
        config = getattr(processes.client, "model_config", None)
        self._vocabulary = config.get_vocab_size() if config is not None else MOST_TOKENS
        self._length = int(getattr(config, "max_model_len", None) or self.max_model_len or MOST_TOKENS)
        self._handlers: dict[str, tuple[Any, Any]] = {}
        chat, completion = (getattr(state, f"openai_serving_{kind}", None) for kind in ("chat", "completion"))
        if chat is not None:
            self._handlers[CHAT] = ChatCompletionRequest, chat.create_chat_completion
        if completion is not None:
            self._handlers[COMPLETIONS] = CompletionRequest, completion.create_completion
        if (embedding := getattr(state, "serving_embedding", None)) is not None:
            self._handlers[EMBEDDINGS] = _embedding_of(EmbeddingRequest), embedding
        self._as_error = create_error_response

    @classmethod
    async def start(
        cls,
        model: str | os.PathLike[str],
        *,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        revision: str | None = None,
        silent_seconds: float = 300.0,
        stopped_seconds: float = 10.0,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> VLLMEngine:
        """Start vLLM on the running event loop.

        :param model: a folder, `package:NAME` or a hub id; see `ctxflow.models.model_folder`.
        :param adapters: LoRA adapters: the name by which a request's "model" chooses it -> its folder.
        :param silent_seconds: how long an engine that has requests may not answer even whether it is there, before it
            counts as lost. It answers between two steps: a step takes seconds, or minutes where it compiles.
        :param stopped_seconds: how long one of its processes may be stopped (SIGSTOP) while it has requests.
        :param options, settings: options of vLLM, by names as of `vllm serve`: `dtype`, `max_model_len`,
            `tool_call_parser`, ...; how the model is spread over GPUs is as `ctxflow.models.vllm.parallelism` says.
        :raises MissingPackageError: where vLLM is not installed.
        :raises ctxflow.errors.UsageError: for options that it does not have, or that the model does not bear.
        :raises ModelNotFoundError: if the model, or an adapter, is not reachable from here.
        """
        given = plain_names({**(options or {}), **settings})
        check_vllm_options(given)
        folder = locate_model(model, revision=revision)
        loras = {name: _adapter(name, path) for name, path in (adapters or {}).items()}
        chosen = {**given, **_for_adapters(loras, given), **spread(given), **memory_share(given)}
        chosen |= vllm_loader(folder, given)
        arguments = parse_options(one_path(str(folder)), chosen)
        if arguments.allowed_media_domains is None:
            arguments.allowed_media_domains = [_NOWHERE]
        arguments.lora_modules = _modules(loras)
        names = _names(model, arguments)
        arguments.served_model_name = list(names)
        processes = VLLMProcesses(arguments, silent_seconds=silent_seconds, stopped_seconds=stopped_seconds)
        try:
            await processes.connected()
            state = await processes.run(_serving(processes.client, arguments))
            return cls(processes, state, names, tuple(loras), arguments.max_model_len)
        except BaseException:
            processes.close()
            raise

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request; parameters, answers and errors as of `OpenAIEngine.answer`."""
        if self._processes.dead:
            raise await self._processes.lost()
        if endpoint not in self._handlers:
            can = " and ".join(each for each in ENDPOINTS if each in self._handlers) or "nothing that can be asked here"
            raise ItemRefused(f"this model in vLLM does {can}, not {short(endpoint)}: name another model")
        why = await aside(body, lambda: refusal(endpoint, body, "vllm", vocabulary=self._vocabulary))
        if why is not None:
            raise ItemRefused(why)
        kind, handler = self._handlers[endpoint]
        sent = as_sent(endpoint, body, "vllm")
        limited = endpoint != CHAT or {"max_tokens", "max_completion_tokens"} & sent.keys()
        if not limited and (longest := longest_logged(body)) < self._length:
            sent["max_tokens"] = longest
        request = await aside(body, lambda: self._request(kind, sent, body.get("model")))
        try:
            response = await self._processes.run(handler(request))
        except ContextLost:
            raise
        except Exception as error:
            response = self._as_error(error)
        return await self._plain(response)

    @property
    def parks(self) -> bool:
        """Whether it can be parked: on GPUs where it was started with `enable_sleep_mode=True`."""
        return self._processes.parks

    async def park(self) -> None:
        """Have vLLM bring its weights to the host's memory, and drop its cache."""
        await self._processes.park()

    async def wake(self) -> None:
        """Have it answer again."""
        await self._processes.wake()

    async def aclose(self) -> None:
        """End vLLM with its processes, and free its memory."""
        self._processes.close()

    def _request(self, kind: Any, sent: Mapping[str, Any], named: Any) -> Any:
        """Return a request as vLLM has it.

        :param named: the model that it is for.
        """
        import pydantic

        fields = {**sent, "model": named}
        if named is None or named in self._names:
            fields["model"] = self._names[0]
        elif named not in self._adapters:
            known = (self._names[0], *self._adapters)
            meant = closest(str(named), known)
            hint = f"did you mean {meant}?" if meant else f"name {' or '.join(known[:_FEW])}, or leave it out"
            raise ItemRefused(f"there is no model {short(named)} here: {hint}")
        try:
            return kind.validate_python(fields) if hasattr(kind, "validate_python") else kind.model_validate(fields)
        except pydantic.ValidationError as error:
            raise ItemRefused(_told(error)) from None
        except Exception as error:  # Of vLLM's own checks.
            raise ItemRefused(_line(str(error))) from None

    async def _plain(self, response: Any) -> dict[str, Any]:
        """Return an answer as plain data; raise what stands in its place."""
        error = getattr(response, "error", None)
        if error is None:
            if hasattr(response, "model_dump"):
                return response.model_dump(mode="json")  # type: ignore[no-any-return]
            return json.loads(response.body)  # type: ignore[no-any-return]
        if self._processes.dead:
            raise await self._processes.lost()
        if 400 <= int(error.code) < 500:
            raise ItemRefused(_line(str(error.message)))
        raise RuntimeError(f"vLLM could not answer: {_line(str(error.message)) or error.type}")


async def _serving(client: Any, arguments: argparse.Namespace) -> Any:
    """Return what `vllm serve` keeps for its web server: an object that holds the serving classes."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    state = types.SimpleNamespace()  # As of Starlette's applications.
    await init_app_state(client, state, arguments, await client.get_supported_tasks())
    return state


def _embedding_of(kind: Any) -> Any:
    """Return what makes a request for embeddings of plain data: in newer vLLM it is one of several forms."""
    import pydantic

    return kind if hasattr(kind, "model_validate") else pydantic.TypeAdapter(kind)


def _names(model: str | os.PathLike[str], arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return what requests may call the base model; answers have the first."""
    if arguments.served_model_name:
        given = arguments.served_model_name
        return tuple([given] if isinstance(given, str) else given)
    name = os.fspath(model)
    return (Path(name).resolve().name, name) if Path(name).is_dir() else (name,)


def _adapter(name: str, path: str | os.PathLike[str]) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ModelNotFoundError(f"the adapter {name}, {folder}, holds no adapter_config.json: give a LoRA's folder")
    return folder.resolve()


def _for_adapters(adapters: Mapping[str, Path], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which vLLM takes adapters: room for their ranks, and for some at once."""
    if not adapters:
        return {}
    from vllm.platforms import current_platform

    texts = [(folder / "adapter_config.json").read_text("utf-8") for folder in adapters.values()]
    ranks = [json.loads(text).get("r", _RANKS[0]) for text in texts]
    rank = next((each for each in _RANKS if each >= max(ranks)), max(ranks))
    chosen = {"enable_lora": True, "max_lora_rank": rank, "max_loras": min(len(adapters), _ADAPTERS_AT_ONCE), **given}
    if current_platform.is_cpu():
        # There vLLM 0.32 applies what is in the last place to requests that have no adapter: it is left empty.
        chosen["max_loras"] = max(int(chosen["max_loras"]), len(adapters) + 1)
    chosen.setdefault("max_cpu_loras", max(len(adapters), int(chosen["max_loras"])))
    return chosen


def _modules(adapters: Mapping[str, Path]) -> Any:
    if not adapters:
        return None
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath

    return [LoRAModulePath(name, str(folder)) for name, folder in adapters.items()]


def _told(error: Any) -> str:
    """Return what pydantic says of a request in one sentence."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = _line(str(first["msg"]).removeprefix("Value error, "))
    return f"{where}: {message}" if where and where not in message else message


def _line(text: str) -> str:
    return " ".join(text.split())
