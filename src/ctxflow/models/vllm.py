"""Text generation with vLLM, where it is installed: calls and answers as of generate.py's `TextGenerator`.

vLLM batches by itself and pages its cache, so nothing of batches.py and memory.py is used here.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxflow.models.errors import MissingPackageError
from ctxflow.models.locate import locate_model
from ctxflow.models.parallel import parallelism
from ctxflow.models.prompts import (
    Message,
    check_texts,
    context_length,
    encode_chat,
    room,
    tokenize,
    truncate,
)
from ctxflow.models.results import Generation
from ctxflow.models.sampling import Sampling, per_row


class VLLMGenerator:
    """A causal language model in vLLM that continues prompts and answers conversations.

    :param model: a folder, `package:NAME` or a hub id; see `ctxflow.models.locate`.
    :param dtype: "auto" (as the weights were saved), "float16", "bfloat16" or "float32".
    :param tensor_parallel_size: GPUs to spread each layer over, and `pipeline_parallel_size` the layers; by default
        what `ctxflow.models.parallel.parallelism` says of the worker.
    :param gpu_memory_utilization: the share of each GPU's memory to take, in (0, 1]. vLLM takes it at once
        and keeps it: give less where several contexts share a GPU.
    :param max_model_len: tokens to read and write together at most; by default as the model says.
    :param max_input_tokens: longer prompts lose their beginning.
    :param options: further arguments of `vllm.LLM`.
    :raises MissingPackageError: where vLLM is not installed.
    :raises ModelNotFoundError: if the model is not reachable from here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_input_tokens: int | None = None,
        revision: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import vllm
            from transformers import AutoConfig, AutoTokenizer
        except ImportError as error:
            raise MissingPackageError.about("vllm", extra="vllm", why=error) from error
        folder = locate_model(model, revision=revision)
        trusted = {key: value for key, value in (options or {}).items() if key == "trust_remote_code"}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
        length = context_length(AutoConfig.from_pretrained(folder, **trusted))
        self.max_model_len = max_model_len or length
        here = parallelism()
        self.max_input_tokens = max_input_tokens
        self._llm: Any = vllm.LLM(
            model=str(folder),
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size or here.tensor,
            pipeline_parallel_size=pipeline_parallel_size or (1 if tensor_parallel_size else here.pipeline),
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            **(options or {}),
        )

    def generate(self, prompts: Iterable[str], **parameters: Any) -> list[Generation]:
        """Continue each prompt; parameters, answers and errors as `TextGenerator.generate`.

        A seed gives the same text again on the same version of vLLM, not the text that `TextGenerator` gives.
        """
        texts = check_texts(prompts)
        return self._run(tokenize(self.tokenizer, texts), per_row(len(texts), **parameters))

    def chat(
        self,
        conversations: Iterable[Sequence[Message]],
        *,
        template_options: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> list[Generation]:
        """Answer each conversation; parameters, answers and errors as `TextGenerator.chat`."""
        encoded, stops = encode_chat(self.tokenizer, conversations, template_options)
        return self._run(encoded, [row.stopping_at(stops) for row in per_row(len(encoded), **parameters)])

    def close(self) -> None:
        """End vLLM's engine and free its memory; the generator cannot be used afterwards."""
        self._llm = None
        gc.collect()

    def _run(self, encoded: list[list[int]], sampling: list[Sampling]) -> list[Generation]:
        if not encoded:
            return []
        special = self.tokenizer.all_special_ids
        prompts = [
            truncate(ids, room(self.max_model_len, row.max_new_tokens, self.max_input_tokens), special)
            for ids, row in zip(encoded, sampling, strict=True)
        ]
        answers = self._llm.generate(
            [{"prompt_token_ids": tokens.ids} for tokens in prompts],
            sampling_params=[_vllm_parameters(row) for row in sampling],
            use_tqdm=False,
        )
        return [
            Generation(
                text=answer.outputs[0].text,
                prompt_tokens=len(tokens.ids),
                completion_tokens=len(answer.outputs[0].token_ids),
                finish_reason="length" if answer.outputs[0].finish_reason == "length" else "stop",
                truncated=tokens.truncated,
            )
            for answer, tokens in zip(answers, prompts, strict=True)
        ]


def _vllm_parameters(sampling: Sampling) -> Any:
    import vllm

    top_k = {"top_k": sampling.top_k} if sampling.top_k else {}
    return vllm.SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        **top_k,
    )
