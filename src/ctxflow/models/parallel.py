"""How many GPUs a context's worker has, and how a model is to be spread over them.

A site's tier decides: by its `gpus`, and by `variables` where it wants something else than the default.
What does not live here: which tier a context goes to (policies/placement).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from ctxflow.host.devices import cuda_devices
from ctxflow.wording import counted

TENSOR = "CTXFLOW_TENSOR_PARALLEL"
PIPELINE = "CTXFLOW_PIPELINE_PARALLEL"


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """GPUs that each layer is spread over (tensor parallelism), and stages of layers (pipeline parallelism)."""

    tensor: int = 1
    pipeline: int = 1


def parallelism(environment: Mapping[str, str] = os.environ) -> Parallelism:
    """How to spread a model over the worker's GPUs, as the tier's variables say.

    By default each layer over all GPUs, or the largest power of two of them, since attention heads are to be divided
    evenly; 1 without a GPU.

    :raises ValueError: for a variable that is no number, or more GPUs than there are, naming it.

    >>> parallelism({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    Parallelism(tensor=2, pipeline=1)
    >>> parallelism({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CTXFLOW_PIPELINE_PARALLEL": "2"})
    Parallelism(tensor=2, pipeline=2)
    """
    gpus = max(1, len(cuda_devices(environment)))
    pipeline = _number(environment, PIPELINE) or 1
    tensor = _number(environment, TENSOR)
    if tensor is None:
        tensor = 1
        while 2 * tensor * pipeline <= gpus:
            tensor *= 2
    if tensor * pipeline > gpus:
        raise ValueError(
            f"{TENSOR} times {PIPELINE} is {tensor * pipeline}, and the worker has {counted(gpus, 'GPU')}: change the "
            "tier's variables, or its gpus"
        )
    return Parallelism(tensor, pipeline)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} is a number of GPUs, 1 or more, and not {text!r}: change the tier's variables")
    return int(text)
