"""Building a context in its library process: a /dev/shm of its own, garbage seldom looked for, memory measured."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Iterator

from ctxflow.host.library_messages import BuildContext
from ctxflow.host.linux import descendants, die_with_parent, holds_gpu, tree_bytes
from ctxflow.recipe import Context, needs_loop

ASKED = "CTXFLOW_PRIVATE_SHM"
"""A variable of a context by which it asks for a /dev/shm of its own, "1", or refuses one, "0"; see private_shm.py."""
_OBJECTS_OF_BUILD = 100_000  # Made before garbage is looked for while a context is built.


def hide_shared_memory(load: BuildContext, scratch: str) -> None:
    """Have a /dev/shm of this process's own, where the context is to have one; before anything of the user's runs."""
    loops, asked = needs_loop(load.body), os.environ.get(ASKED)
    if asked != "1" and (asked == "0" or not loops):
        return
    from ctxflow.host import private_shm  # Which few library processes need.

    parent = os.getppid()
    with contextlib.suppress(OSError):  # There is no current directory.
        paths = [scratch, os.getcwd(), load.directory, load.line, sys.executable, *sys.path, *load.files.values()]
        paths += os.environ.values()  # As HF_HOME.
        named = private_shm.FOLDER.encode() in load.body  # As a model, in what the context is built from.
        if not named and private_shm.wanted(os.environ, paths) and private_shm.enter():
            die_with_parent(parent)  # The kernel forgets that where rights change.


def opened_recipe(load: BuildContext) -> Context:
    """Return the recipe of a load."""
    function, args, kwargs = pickle.loads(load.body)
    return Context(load.name, function, args, kwargs, files=dict(load.files))


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Collect garbage less often than Python does, which is a sixth of the time of importing PyTorch."""
    before = gc.get_threshold()
    ours = (_OBJECTS_OF_BUILD, *before[1:])
    if before[0]:
        gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)


def measured_bytes() -> tuple[int | None, int | None]:
    """Return the memory of a context that is built, on the host and on each GPU, in bytes: None where unknown.

    It is that of this process and its descendants, with shared pages counted once, and what torch has reserved here:
    of what other processes hold on a GPU, as those of engines do, only its driver knows.
    """
    memory = tree_bytes([os.getpid()])
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or any(map(holds_gpu, descendants(os.getpid()))):
        return memory, None
    gpu: int = max(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    return memory, gpu
