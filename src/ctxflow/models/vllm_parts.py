"""What the start of vLLM's processes goes into: they tell it the process that started them, in a file.

The engine core, and its workers where these are processes too, first import what they need; then weights are read.
After that the core looks for room for the cache of keys and values (`_initialize_kv_caches`), where the model is tried
with the longest batch and compiled, and graphs are captured. Of a version of vLLM without that method only imports are
told.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from typing import Any

from ctxflow.on_worker import add_load_part

FILE = "load-parts"
"""In the folder of vLLM's sockets, which is of this user alone, and removed once the engine answers."""
_IMPORTED, _TRIED = "imported", "tried"


def tell_imported(folder: str) -> None:
    """Tell that this process, an engine core or a worker of one, has its imports done."""
    _tell(folder, _IMPORTED, time.monotonic())


def tell_tried(folder: str) -> None:
    """Have this process, which is about to be an engine core, tell how long it tries and compiles its model."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    initialize = getattr(core, "_initialize_kv_caches", None)
    if initialize is None:
        return

    def initialize_timed(self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = initialize(self, config, *args, **kwargs)
        compiled = float(getattr(config.compilation_config, "compilation_time", None) or 0.0)
        _tell(folder, _TRIED, began, time.monotonic(), compiled)
        return result

    core._initialize_kv_caches = initialize_timed


def _tell(folder: str, what: str, *times: float) -> None:
    with contextlib.suppress(OSError), open(os.path.join(folder, FILE), "a") as file:
        file.write(json.dumps([what, *times]) + "\n")


def add_parts(folder: str, began: float) -> None:
    """Add what an engine core and its workers told, which were begun at a time, to the parts of this process's load."""
    imported = began
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, FILE)) as file:
        for what, *times in map(json.loads, file):
            if what == _IMPORTED:  # By the core, and then by its workers.
                add_load_part("imports", imported, times[0])
                imported = max(imported, times[0])
            else:
                tries, ended, compiled = times
                add_load_part("weights", imported, tries)
                add_load_part("warm-up", tries, ended - compiled)
                add_load_part("compile", max(tries, ended - compiled), ended)
