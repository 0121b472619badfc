"""Generate text with vLLM, where it is installed: calls and answers as of generate.py's `TextGenerator`.

vLLM batches by itself and pages its cache. `parallelism` says how many GPUs a context's worker has, and how a model is
spread over them: a site's tier decides, by its `gpus`, and by `env` where it wants something else than the default.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

from ctxflow.errors import ContextLost, counted
from ctxflow.host.private_shm import one_path
from ctxflow.models.model_folder import check_ability, locate_model
from ctxflow.models.reading import (
    Message,
    Read,
    Reader,
    Tokens,
    answered,
    context_length,
)
from ctxflow.models.results import Generation, MissingPackageError, Sampling
from ctxflow.models.vllm_options import memory_share, parse_options, plain_names
from ctxflow.models.vllm_process import VLLMProcesses
from ctxflow.models.weight_reading import vllm_loader
from ctxflow.topology.machine import cuda_devices


class VLLMGenerator:
    """A causal language model in vLLM that continues prompts and answers conversations.

    :param model: a folder, `package:NAME` or a hub id; see `ctxflow.models.model_folder`.
    :param dtype: "auto" (as the weights were saved), "float16", "bfloat16" or "float32".
    :param tensor_parallel_size: GPUs to spread each layer over, and `pipeline_parallel_size` the layers; by default
        what `ctxflow.models.vllm.parallelism` says of the worker.
    :param gpu_memory_utilization: the share of each GPU's memory to take, in (0, 1]. vLLM takes it at once
        and keeps it; by default it is what the context declares by `gpu_memory=`, or as vLLM has it.
    :param max_model_len: tokens to read and write together at most; by default as the model says.
    :param max_input_tokens, too_long: as `TextGenerator`.
    :param task: what it is for: "chat" takes a chat template.
    :param options: further options of vLLM, by names as of `vllm serve`.
    :raises MissingPackageError: where vLLM is not installed.
    :raises ctxflow.errors.UsageError: for options that it does not have, or that the model does not bear.
    :raises WrongModelError: if the model cannot do that.
    :raises ModelNotFoundError: if the model is not reachable from here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        max_input_tokens: int | None = None,
        too_long: str = "error",
        task: str = "generate",
        revision: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import vllm  # noqa: F401 - before anything is fetched.
            from transformers import AutoConfig, AutoTokenizer
        except ImportError as error:
            raise MissingPackageError.about("vllm", extra="vllm", why=error) from error
        folder = locate_model(model, revision=revision)
        check_ability(os.fspath(model), folder, task)
        trusted = {key: value for key, value in plain_names(options or {}).items() if key == "trust_remote_code"}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
        length = context_length(AutoConfig.from_pretrained(folder, **trusted))
        self.max_model_len = max_model_len or length
        self._reader = Reader(self.tokenizer, self.max_model_len, max_input_tokens, too_long)
        chosen = {
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            **plain_names(options or {}),
        }
        chosen |= {**spread(chosen), **memory_share(chosen), **vllm_loader(folder, chosen)}
        self._engine = _EngineThread(parse_options(one_path(str(folder)), chosen))

    def generate(self, prompts: Iterable[str], *, on_error: str = "raise", **parameters: Any) -> list[Generation]:
        """Continue each prompt; parameters, answers and errors as `TextGenerator.generate`.

        A seed gives the same text again on the same version of vLLM, not the text that `TextGenerator` gives.

        :raises ctxflow.errors.ContextLost: if vLLM's processes have ended, or do so meanwhile.
        """
        return self._run(*self._reader.prompts(prompts, parameters), on_error, "prompts")

    def chat(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        template_options: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **parameters: Any,
    ) -> list[Generation]:
        """Answer each conversation; parameters, answers and errors as `TextGenerator.chat`."""
        read = self._reader.chats(conversations, template_options, parameters)
        return self._run(*read, on_error, "conversations")

    @property
    def parks(self) -> bool:
        """Whether it can be parked: on GPUs where it was started with the option `enable_sleep_mode`."""
        return self._engine.processes.parks

    def park(self) -> None:
        """Have vLLM bring its weights to the host's memory, and drop its cache."""
        self._engine.wait(self._engine.processes.park)

    def wake(self) -> None:
        """Have it answer again."""
        self._engine.wait(self._engine.processes.wake)

    def close(self) -> None:
        """End vLLM's engine and free its memory; the generator cannot be used afterwards."""
        self._engine.close()

    def _run(self, read: list[Read], sampling: list[Sampling], on_error: str, what: str) -> list[Generation]:
        def written(numbers: list[int]) -> list[Generation]:
            prompts = [tokens for number in numbers if isinstance(tokens := read[number], Tokens)]
            if not prompts:
                return []
            answers = self._engine.answers([tokens.ids for tokens in prompts], [sampling[number] for number in numbers])
            return [_generation(answer.outputs[0], tokens) for answer, tokens in zip(answers, prompts, strict=True)]

        return cast(list[Generation], list(answered(read, written, on_error, what)))  # Errors if they were asked for.


class _EngineThread:
    """vLLM's asynchronous engine, `processes`, with an event loop in a thread of its own, for callers that wait.

    The thread lives as long as the engine, which ends with it.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ctxflow-vllm", daemon=True)
        self._thread.start()

        async def start() -> VLLMProcesses:
            processes = VLLMProcesses(arguments)
            try:
                await processes.connected()
            except BaseException:
                processes.close()
                raise
            return processes

        try:
            self.processes: VLLMProcesses = self.wait(start)
        except BaseException:
            self._end_thread()
            raise

    def answers(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Any]:
        """Return vLLM's answers to prompts of tokens, in their order; if one fails, or at Ctrl-C, all are ended."""
        if not self._thread.is_alive():
            raise ContextLost("vLLM's engine was closed: build the generator again")

        async def answer(prompt: Sequence[int], parameters: Any) -> Any:
            request, answers = {"prompt_token_ids": list(prompt)}, []
            async for each in self.processes.client.generate(request, parameters, request_id=uuid.uuid4().hex):
                answers.append(each)
            return answers[-1]

        async def run() -> list[Any]:
            asked = [
                asyncio.ensure_future(self.processes.run(answer(prompt, _vllm_parameters(row))))
                for prompt, row in zip(prompts, sampling, strict=True)
            ]
            try:
                return await asyncio.gather(*asked)
            except BaseException:
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                raise

        return self.wait(run)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the engine and the thread."""
        if self._thread.is_alive():

            async def close() -> None:
                self.processes.close()

            self.wait(close)
            self._end_thread()

    def wait(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return what work on the loop gives."""
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _generation(output: Any, prompt: Tokens) -> Generation:
    return Generation(
        text=output.text,
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(output.token_ids),
        finish_reason="length" if output.finish_reason == "length" else "stop",
        truncated=prompt.truncated,
        original_prompt_tokens=prompt.original,
    )


def _vllm_parameters(sampling: Sampling) -> Any:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        max_tokens=sampling.max_new_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        **({"top_k": sampling.top_k} if sampling.top_k else {}),
    )


TENSOR = "CTXFLOW_TENSOR_PARALLEL"
PIPELINE = "CTXFLOW_PIPELINE_PARALLEL"


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """GPUs that each layer is spread over (tensor parallelism), and stages of layers (pipeline parallelism)."""

    tensor: int = 1
    pipeline: int = 1


def parallelism(
    environment: Mapping[str, str] = os.environ, *, replicas: int = 1, pipeline: int | None = None
) -> Parallelism:
    """Return how to spread a model over the worker's GPUs, as the tier's variables say.

    By default each layer over all GPUs, or the largest power of two of them, since attention heads are to be divided
    evenly; 1 without a GPU.

    :param replicas: of the model, which share the GPUs (data parallelism).
    :param pipeline: stages of layers, in place of the tier's.
    :raises ValueError: for a variable that is no number, or more GPUs than there are, naming it.

    >>> parallelism({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    Parallelism(tensor=2, pipeline=1)
    >>> parallelism({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CTXFLOW_PIPELINE_PARALLEL": "2"})
    Parallelism(tensor=2, pipeline=2)
    """
    gpus = max(1, len(cuda_devices(environment)) // replicas)
    stages = pipeline or _number(environment, PIPELINE) or 1
    asked = _number(environment, TENSOR)
    tensor = asked or 1 << max(0, (gpus // stages).bit_length() - 1)
    if tensor * stages > gpus and (asked or pipeline is None):  # What the options alone ask for, vLLM judges.
        whose = "each of the worker's replicas" if replicas > 1 else "the worker"
        other, change = (PIPELINE, "") if pipeline is None else ("pipeline_parallel_size", "that, ")
        raise ValueError(
            f"{TENSOR} times {other} is {tensor * stages}, and {whose} has {counted(gpus, 'GPU')}: change {change}the "
            "tier's variables, or its gpus"
        )
    return Parallelism(tensor, stages)


def spread(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's options that spread a model as the worker has GPUs, but for those that are given.

    Where layers are to be spread over so many GPUs, stages of layers are not asked for beside them. Replicas of the
    model on this machine (data parallelism), and what else vLLM multiplies their GPUs by, share the GPUs.

    >>> spread({"tensor_parallel_size": 1})
    {'tensor_parallel_size': 1, 'pipeline_parallel_size': 1}
    """
    tensor, stages = options.get("tensor_parallel_size"), options.get("pipeline_parallel_size")
    if tensor:
        return {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages or 1}
    replicas = options.get("data_parallel_size_local") or options.get("data_parallel_size")
    times = _whole(replicas) * _whole(options.get("prefill_context_parallel_size"))
    here = parallelism(replicas=times, pipeline=_whole(stages) if stages else None)
    return {"tensor_parallel_size": here.tensor, "pipeline_parallel_size": stages or here.pipeline}


def _whole(given: Any) -> int:
    """Return a number of GPUs as an option has it, 1 where it is none: vLLM's parser tells what is wrong."""
    return int(given) if str(given).isdigit() and int(given) else 1


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} is a number of GPUs, 1 or more, and not {text!r}: change the tier's variables")
    return int(text)
