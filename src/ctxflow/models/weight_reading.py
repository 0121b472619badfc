"""Weights on their way from files to memory: read ahead while libraries are imported, and told how they came.

Transformers maps weights that keep their type (its parameters are the file's pages, shared by all processes of a
machine), and nothing is quicker on a local disk; but it begins to read when all imports are done, and from a disk that
waits for each page. So the machine's page cache is filled meanwhile. Needs no torch.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.host.linux import free_memory
from ctxflow.host.local_files import OF_LIBRARY
from ctxflow.models.model_folder import folder_here, read_json, weight_files

_PART, _LOOK = 64 << 20, 8 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22  # The first is refused where huge pages are off, the second before 5.14.
_STREAMS, _STREAMS_SHARED = 4, 8  # One reader waits for each answer of a server's; a disk's queue is full with fewer.
_THREADS = "ctxflow-read-ahead"
_SHARED = {
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip


def read_ahead(model: str | os.PathLike[str]) -> list[threading.Thread]:
    """Begin to read the weights of a model into this machine's page cache, and return at once.

    Ready-made contexts do so before they import anything; a context of your own may, as its first statement. It is a
    hint: nothing is read of a model that is not on this machine yet, nor of one that would take more than half of the
    memory that is free. What is in memory already is passed over.

    :param model: a folder, a file, `package:NAME` or a hub id; see `ctxflow.models.locate_model`.
    :returns: the threads that read. They need not be waited for, and end with the process.

    >>> read_ahead("/no/such/folder")
    []
    """
    name = os.fspath(model)
    try:
        files = [name] if os.path.isfile(name) else [os.fspath(path) for path in weight_files(folder_here(name))]
        sizes = [os.path.getsize(file) for file in files]
    except (OSError, ValueError, KeyError):  # The loader will say it.
        return []
    if not files or sum(sizes) > free_memory() / 2:
        return []
    # Looked for here: threads that look take turns with imports and builders, which costs more than looking.
    parts = collections.deque(
        (file, start)
        for file, size in zip(files, sizes, strict=True)
        for start in range(0, size, _PART)
        if not _in_memory(file, start, min(size, start + _PART))
    )
    if not parts:
        return []
    threads = [
        threading.Thread(target=_read, args=(parts,), name=_THREADS, daemon=True)
        for _ in range(min(len(parts), _streams(files[0])))
    ]
    for thread in threads:
        thread.start()
    return threads


def finish_reading() -> None:
    """Wait until this process reads nothing ahead any more, before it is forked: that is safe without threads alone."""
    for thread in threading.enumerate():
        if thread.name == _THREADS:
            thread.join()


def _read(parts: collections.deque[tuple[str, int]]) -> None:
    """Read parts of files until there are none, in the kernel: nothing is copied, and imports keep Python's lock."""
    with contextlib.suppress(OSError, IndexError), open(os.devnull, "wb") as nowhere:
        while True:
            file, start = parts.popleft()
            with open(file, "rb") as source:
                end = min(start + _PART, os.fstat(source.fileno()).st_size)
                if _populate(source.fileno(), start, end):
                    continue
                while start < end and (sent := os.sendfile(nowhere.fileno(), source.fileno(), start, end - start)):
                    start += sent


def _populate(file: int, start: int, end: int) -> bool:
    """Have a part of a file come to memory in huge pages, where the kernel can; return whether it has come.

    Whoever maps the file then has it with a fault for 2 MB, not for 64 KB: reading 1 GB through a mapping takes as long
    as with `cat`, and else half as long again. (`mmap.madvise` would keep Python's lock.)
    """
    with contextlib.suppress(OSError), _mapping(file, start, end) as (libc, place):
        return all(libc.madvise(place, end - start, advice) == 0 for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_READ))
    return False


def _in_memory(file: str, start: int, end: int) -> bool:
    """Return whether a part of a file seems to be in the page cache: pages here and there are."""
    places = (*range(start, end, _LOOK), (end - 1) // mmap.PAGESIZE * mmap.PAGESIZE)
    try:
        with open(file, "rb", buffering=0) as opened:
            if os.access(file, os.W_OK):  # The kernel tells nobody else.
                page = ctypes.c_ubyte()
                with _mapping(opened.fileno(), start, end) as (libc, at):
                    return all(
                        libc.mincore(at + place - start, 1, ctypes.byref(page)) == 0 and page.value & 1
                        for place in places
                    )
            # What can be had without waiting: on a very quick disk that is all. By default the kernel would begin to
            # read on from there, in small pages.
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return all(os.preadv(opened.fileno(), [bytearray(1)], place, os.RWF_NOWAIT) for place in places)
    except OSError:
        return False


@contextlib.contextmanager
def _mapping(file: int, start: int, end: int) -> Iterator[tuple[Any, int]]:
    """Map a part of a file, and yield the C library and the address.

    :raises OSError: if it cannot be mapped.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    place = libc.mmap(None, end - start, mmap.PROT_READ, mmap.MAP_SHARED, file, start) if end > start else None
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError("it cannot be mapped")
    try:
        yield libc, place
    finally:
        libc.munmap(place, end - start)


def _streams(file: str) -> int:
    """Return how many readers have a file's storage work at its speed."""
    if on_shared_storage(file):
        return _STREAMS_SHARED
    device = os.stat(file).st_dev
    block = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (block, os.path.dirname(block)):  # Of a partition, its disk.
        with contextlib.suppress(OSError), open(os.path.join(folder, "queue", "rotational")) as said:
            return 1 if said.read().strip() == "1" else _STREAMS
    return _STREAMS


def on_shared_storage(path: str | os.PathLike[str], mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether a file is on a file system that machines share (NFS, Lustre, GPFS, Ceph, FUSE, ...).

    :param mounts: what is mounted where, as the kernel tells it.
    :raises OSError: if there is no such file.

    >>> on_shared_storage("/proc/self/mountinfo")
    False
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open(mounts) as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                kind = after.split()[0]
                return kind in _SHARED or kind == "fuse" or kind.startswith("fuse.")
    return False


def vllm_loader(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """Return vLLM's option by which weights on shared storage are read, if a better loader than its own is installed.

    That is Run:ai's model streamer, whose threads read whole files at once. On a disk of the machine itself nothing is
    quicker than mapped files, and on NFS vLLM reads ahead by itself; a quantised model's loader is left to vLLM.

    :param given: the options that the user gives, which are kept: with any about loading, nothing is chosen here.
    """
    chosen = ("load_format", "safetensors_load_strategy", "model_loader_extra_config", "quantization")
    files = weight_files(folder)
    if any(given.get(name) for name in chosen) or not files or files[0].suffix != ".safetensors":
        return {}
    if read_json(folder / "config.json").get("quantization_config") or not on_shared_storage(files[0]):
        return {}
    if set(folder.rglob("*.safetensors")) != set(files):  # All of which it would take for the model's.
        return {}
    return {"load_format": "runai_streamer"} if importlib.util.find_spec("runai_model_streamer") else {}


def mapped_bytes(tensors: Iterable[Any], files: Sequence[str | os.PathLike[str]]) -> int:
    """Return how many bytes of torch tensors are pages of files that this process has mapped, and no copies of them."""
    names = {os.path.realpath(file) for file in files}
    ranges = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5] in names:
                ranges.append([int(end, 16) for end in fields[0].split("-")])
    return sum(
        tensor.nbytes
        for tensor in tensors
        if tensor.device.type == "cpu" and any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    )


def tell_weights(name: str, folder: Path, model: Any, seconds: float) -> None:
    """Say in a library process's log how a model's weights came, and how fast; elsewhere say nothing.

    :param model: a torch module that was loaded from the folder.
    :param seconds: that loading took, without imports.
    """
    files = weight_files(folder)
    if OF_LIBRARY not in os.environ or not files:
        return
    size = sum(file.stat().st_size for file in files)
    weights = list(model.parameters())
    text = f"{size / 1e9:.3g} GB of weights of {name}"
    if mapped_bytes(weights, files) > 0.5 * sum(weight.nbytes for weight in weights):
        text = f"{text} mapped in {seconds:.2g} s, to be read when they are used, {_storage(files[0])}"
    else:
        kind, place = str(weights[0].dtype).removeprefix("torch."), weights[0].device
        text = f"{text} loaded as {kind} on {place} in {seconds:.2g} s, {size / 1e9 / max(seconds, 1e-3):.2g} GB/s, "
        text += _storage(files[0])
    sys.stderr.write(f"[ctxflow: {text}]\n")


def _storage(file: Path) -> str:
    return "from shared storage" if on_shared_storage(file) else "from this machine's disk"
