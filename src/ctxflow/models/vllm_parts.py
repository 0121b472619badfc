"""What the start of vLLM's engine core goes into: the core tells it the process that started it, in a file.

The core runs in a process of its own. It has its model when it looks for room for the cache of keys and values
(`_initialize_kv_caches`), where it tries the model with the longest batch, compiles it, and captures graphs. A version
of vLLM without that method is told of as a whole.
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


def tell_parts(folder: str) -> None:
    """Have this process, which is about to be an engine core, tell how long its imports, weights and tries took."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    imported = time.monotonic()
    initialize = getattr(core, "_initialize_kv_caches", None)
    if initialize is None:
        return

    def initialize_timed(self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = initialize(self, config, *args, **kwargs)
        ended = time.monotonic()
        compiled = float(getattr(config.compilation_config, "compilation_time", None) or 0.0)
        warm = max(began, ended - compiled)
        parts = [("imports", 0.0, imported), ("weights", imported, began), ("warm-up", began, warm)]
        with contextlib.suppress(OSError), open(os.path.join(folder, FILE), "w") as file:
            json.dump([*parts, ("compile", warm, ended)], file)
        return result

    core._initialize_kv_caches = initialize_timed


def add_parts(folder: str, began: float) -> None:
    """Add what an engine core told, which was begun at a time, to the parts of this process's load."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(os.path.join(folder, FILE)) as file:
        for name, since, until in json.load(file):
            add_load_part(name, max(since, began), until)
