"""How fast a model should be on a GPU, from what both are: the roofline estimate.

A pass over the prompt is bound by arithmetic, a step that writes a token by reading the weights and the KV cache of all
that are written together. Both are taken to reach `EFFICIENCY` of what the data sheet says. It is an estimate, for
where nothing was measured: a factor of two off is no surprise.
"""

from __future__ import annotations

import dataclasses

from ctxflow.models.model_folder import Shape
from ctxflow.planning.worker_blocks import Speed

EFFICIENCY = 0.5
USABLE = 0.9
"""The share of a GPU's memory for weights and KV cache."""
MOST_TOGETHER = 256
"""Queries written together at most."""


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """A GPU's data sheet: memory in GB, dense half-precision TFLOPS, memory bandwidth in GB/s."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float


# Half precision without sparsity; of Pascal, whose half precision is slow, single precision.
GPUS = {name: DataSheet(*figures) for name, figures in {
    "GTX 1080 Ti": (11, 11.3, 484), "TITAN X (Pascal)": (12, 11, 480), "TITAN RTX": (24, 130, 672),
    "RTX 2080 Ti": (11, 54, 616), "RTX 3090": (24, 71, 936), "RTX 4090": (24, 165, 1008),
    "Quadro RTX 6000": (24, 130, 672), "RTX A5000": (24, 111, 768), "RTX A6000": (48, 155, 768),
    "Tesla P100": (16, 18.7, 732), "Tesla V100": (16, 112, 900), "Tesla T4": (16, 65, 320), "A10": (24, 125, 600),
    "A30": (24, 165, 933), "A40": (48, 150, 696), "L4": (24, 121, 300), "L40": (48, 181, 864), "L40S": (48, 362, 864),
    "A100 40GB": (40, 312, 1555), "A100 80GB": (80, 312, 1935), "H100 PCIe": (80, 756, 2000),
    "H100 80GB HBM3": (80, 989, 3350), "H200": (141, 989, 4800),
}.items()}  # fmt: skip


def gpu_of(name: str) -> DataSheet | None:
    """Return the data sheet of a GPU by the name that its driver gives it; None if it is not in the table.

    >>> gpu_of("NVIDIA A10").memory_gb, gpu_of("NVIDIA L40S").tflops, gpu_of("NVIDIA A100-SXM4-80GB").bandwidth_gb_s
    (24, 362, 1935)
    >>> gpu_of("unheard of") is None
    True
    """
    words = set(name.lower().replace("-", " ").split())
    known = [(len(key), gpu) for key, gpu in GPUS.items() if set(key.lower().split()) <= words]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def estimate(
    model: Shape, gpu: DataSheet, gpus: int, input_tokens: float, output_tokens: float, max_delay: float
) -> Speed | None:
    """Return what a query takes on a worker, with as many served together as memory and the delay limit allow.

    :param gpus: of the worker, which share the model.
    :returns: None if the model and one query do not fit the worker's memory.

    >>> small = Shape(1.7e9, 3.4, 196608)
    >>> speed = estimate(small, GPUS["A10"], 1, 500, 100, 60.0)
    >>> round(speed.delay, 1), round(speed.seconds, 3)
    (9.6, 0.075)
    >>> estimate(small, DataSheet(3, 10, 300), 1, 500, 100, 60.0) is None
    True
    """
    tokens = input_tokens + output_tokens
    cache = model.kv_bytes_per_token * tokens / 1e9
    room = USABLE * gpus * gpu.memory_gb - model.weights_gb
    if room < cache or room < 0:
        return None
    flops, bandwidth = EFFICIENCY * gpus * gpu.tflops * 1e12, EFFICIENCY * gpus * gpu.bandwidth_gb_s
    reading = 2 * model.parameters * input_tokens / flops
    together = 1
    while together * 2 <= MOST_TOGETHER and together * 2 * cache <= room:
        together *= 2
    while True:
        step = max((model.weights_gb + together * cache) / bandwidth, 2 * model.parameters * together / flops)
        # One that comes waits for the others' prompts too.
        speed = Speed(reading * together + output_tokens * step, reading + output_tokens * step / together)
        if speed.delay <= max_delay or together == 1:
            return speed
        together //= 2
