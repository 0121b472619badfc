"""Parking what a library process has built: what is on GPUs comes to the host's memory, and goes back to its place.

What was built may see to that itself: by `park()` and `wake()`, either of them async where it was built on an event
loop, and, if it cannot do so always, `parks`, which is False then. Else all tensors of torch are moved: their storages
are, so that whatever refers to them stays as it is, views and tied weights too. Where no process has a GPU open there
is nothing to move. What other libraries, or processes beside this one, hold on a GPU nobody can move from here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable
from typing import Any

from ctxflow.host.gpu_copies import copy_bytes, host_bytes
from ctxflow.host.linux import descendants, holds_gpu


class Parking:
    """Parks and wakes one built value.

    :raises RuntimeError: by `park`, if something says meanwhile that it must not be moved.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._own = all(callable(getattr(value, name, None)) for name in ("park", "wake"))
        self._moved: MovedTensors | None = None

    @property
    def possible(self) -> bool:
        """Whether the value may be parked."""
        if not getattr(self._value, "parks", True):
            return False
        if self._own or not any(map(holds_gpu, (os.getpid(), *descendants(os.getpid())))):
            return True
        torch = _torch()
        return torch is not None and not any(map(holds_gpu, descendants(os.getpid()))) and not _has_graphs(torch)

    def park(self) -> Any:
        """Give up what the value has on GPUs; what is returned is awaited, if it can be."""
        if self._own:
            return self._value.park()
        if (torch := _torch()) is not None:
            if _has_graphs(torch):
                raise RuntimeError("it has captured CUDA graphs, which hold the addresses of what would be moved")
            gc.collect()
            self._moved = MovedTensors(torch, _tensors(torch, "cuda"))
            torch.cuda.empty_cache()
        return None

    def wake(self) -> Any:
        """Have the value as it was; what is returned is awaited, if it can be."""
        if self._own:
            return self._value.wake()
        moved, self._moved = self._moved, None
        if moved is not None:
            moved.put_back()
        return None


class MovedTensors:
    """The contents of tensors' storages, in the host's memory; the storages are empty until they are put back.

    :param torch: the module.
    :param tensors: those that are moved, with all that share their storages.
    """

    def __init__(self, torch: Any, tensors: Iterable[Any]) -> None:
        self._torch = torch
        found: dict[tuple[Any, int], Any] = {}
        for each in tensors:
            storage = each.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found.setdefault((storage.device, storage.data_ptr()), storage)
        self._sizes = [(storage, storage.nbytes()) for storage in found.values()]
        self._content = host_bytes(torch, sum(size for _, size in self._sizes))
        self._copy(to_host=True)
        for storage, _ in self._sizes:
            storage.resize_(0)

    def put_back(self) -> None:
        """Fill the storages again, and free the host's memory."""
        for storage, size in self._sizes:
            storage.resize_(size)
        self._copy(to_host=False)
        self._sizes, self._content = [], None

    def _copy(self, to_host: bool) -> None:
        torch, begin = self._torch, 0
        pairs: dict[Any, list[tuple[Any, Any]]] = {}
        for storage, size in self._sizes:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            here = self._content[begin : begin + size]
            pairs.setdefault(storage.device, []).append((there, here) if to_host else (here, there))
            begin += size
        for each in pairs.values():
            copy_bytes(torch, each, to_host=to_host)


def _torch() -> Any:
    """Return torch, if it uses a GPU here."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _has_graphs(torch: Any) -> bool:
    """Return whether some memory is in a pool of its own, as that of CUDA graphs is."""
    return any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in torch.cuda.memory_snapshot())


def _tensors(torch: Any, kind: str) -> list[Any]:
    """Return the tensors of this process on devices of a kind that have a storage."""
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == kind and each.layout is torch.strided:
            # Of those that only describe others, as a compiler's do, the storage is elsewhere, or there is none.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                if each.untyped_storage().device.type == kind:
                    found.append(each)
    return found
