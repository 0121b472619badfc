"""Copies between the host's memory and a GPU's by several threads at once, through a little memory that is pinned.

Memory that is not pinned the driver copies by one thread, at a sixth of what the bus does (8.5 and 48 GB/s on an H100);
and to pin all of it takes longer than to copy it. So each thread has two small pinned buffers: it fills one, or empties
it, while the GPU copies the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PIECE, _THREADS = 4 << 20, 8
_FEW = 32 << 20  # Less than that is copied before threads have begun.


def copy_bytes(torch: Any, pairs: Sequence[tuple[Any, Any]], *, to_host: bool) -> None:
    """Copy tensors of bytes, each to another of the same size, and return when all are there.

    What the device's streams had to do is waited for first. Devices that are no GPUs are copied to alike.

    :param torch: the module.
    :param pairs: from where, to where: contiguous tensors of one dimension and uint8, one of each pair on the host, and
        the others all on one device.
    :param to_host: the direction.

    >>> import importlib.util
    >>> if importlib.util.find_spec("torch"):
    ...     import torch
    ...     here, there = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    ...     copy_bytes(torch, [(here, there)], to_host=False)
    ...     assert torch.equal(here, there)
    """
    size = sum(source.nbytes for source, _ in pairs)
    if not size:
        return
    device = pairs[0][0].device if to_host else pairs[0][1].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if size < _FEW:
        for source, target in pairs:
            target.copy_(source)
        return
    pieces = deque(
        (source[start : start + _PIECE], target[start : start + _PIECE])
        for source, target in pairs
        for start in range(0, source.nbytes, _PIECE)
    )
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with _pinned(torch, device, 2 * threads * _PIECE) as memory, ThreadPoolExecutor(threads, "ctxflow-copy") as pool:
        parts = [memory[start : start + 2 * _PIECE] for start in range(0, memory.nbytes, 2 * _PIECE)]
        for done in [pool.submit(_copy_pieces, torch, device, pieces, part, to_host) for part in parts]:
            done.result()


def host_bytes(torch: Any, size: int) -> Any:
    """Return so many new bytes of the host's memory as a tensor, in huge pages where the kernel gives them."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_bytes(torch: Any, tensor: Any) -> Any:
    """Return a contiguous tensor's memory as a tensor of bytes of one dimension, which is the same memory."""
    start, storage = tensor.storage_offset() * tensor.element_size(), tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (tensor.nbytes,))


def _copy_pieces(torch: Any, device: Any, pieces: deque[tuple[Any, Any]], memory: Any, to_host: bool) -> None:
    """Copy pieces until there are none, through the two halves of some pinned memory."""
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None
    buffers = [_Buffer(torch.cuda.Event() if on_gpu else None, half) for half in (memory[:_PIECE], memory[_PIECE:])]
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        while True:
            buffers.reverse()
            buffers[0].settle()
            try:
                source, target = pieces.popleft()
            except IndexError:
                break
            if to_host:
                buffers[0].from_device(source, target)
            else:
                buffers[0].to_device(source, target)
    for buffer in buffers:
        buffer.settle()


class _Buffer:
    """Pinned memory on the way of one piece at a time."""

    def __init__(self, copied: Any, memory: Any) -> None:
        self._copied, self._memory, self._target, self._used = copied, memory, None, False

    def to_device(self, source: Any, target: Any) -> None:
        """Begin to copy a piece to a device."""
        here = self._memory[: source.nbytes]
        ctypes.memmove(here.data_ptr(), source.data_ptr(), source.nbytes)  # Without Python's lock.
        self._begin(here, target)

    def from_device(self, source: Any, target: Any) -> None:
        """Begin to copy a piece from a device; it is at its target once the buffer is settled."""
        self._begin(source, self._memory[: source.nbytes])
        self._target = target

    def _begin(self, source: Any, target: Any) -> None:
        target.copy_(source, non_blocking=True)
        self._used = True
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> None:
        """Wait until what was begun is done."""
        if self._used and self._copied is not None:
            self._copied.synchronize()
        target, self._target, self._used = self._target, None, False
        if target is not None:
            ctypes.memmove(target.data_ptr(), self._memory.data_ptr(), target.nbytes)


@contextlib.contextmanager
def _pinned(torch: Any, device: Any, size: int) -> Iterator[Any]:
    """Yield bytes of the host's memory that a GPU copies by itself; pages that torch pins it would keep for ever."""
    memory = host_bytes(torch, size)
    runtime = torch.cuda.cudart() if device.type == "cuda" else None
    pinned = runtime is not None and int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) == 0
    try:
        yield memory
    finally:
        if runtime is not None and pinned:
            runtime.cudaHostUnregister(memory.data_ptr())
