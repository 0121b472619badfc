"""How a library process is started: by which Python, and with which environment variables."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping

from ctxflow.host.linux import package_root, python_path


def interpreter() -> str:
    """Return the Python that library processes run: the host's own, unless CTXFLOW_PYTHON names another."""
    return os.environ.get("CTXFLOW_PYTHON") or sys.executable


def command(program: str) -> list[str]:
    """Return the words that start the program `library` or `zygote`: of the zip file, by what imports its bytecode."""
    root = package_root()
    return [interpreter(), *([root, program] if os.path.isfile(root) else ["-m", f"ctxflow.host.{program}"])]


def library_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a library process's environment variables, where its context has `environment`."""
    own = {**_given(), **environment}
    return {
        **without_usage_statistics(own),
        **_NO_COMPILED_HEADERS,
        **own,
        **python_path(environment),
        "PYTHONUNBUFFERED": "1",
    }


# Compiled headers of C++ (110 MB) are in no folder that a variable names: each worker would compile them anew, also for
# kernels that it has already (artifacts.py).
_NO_COMPILED_HEADERS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def _given() -> dict[str, str]:
    """Return this process's variables, less the folder that torch names in its own once it has compiled something.

    Else all that a program starts after that would seem to be told where to compile (artifact_keys.py).
    """
    torchs = os.path.join(tempfile.gettempdir(), "torchinductor_")
    return {
        name: value
        for name, value in os.environ.items()
        if name != "TORCHINDUCTOR_CACHE_DIR" or not value.startswith(torchs)
    }


_EVERYBODY = "DO_NOT_TRACK"  # Many libraries heed it; it would turn off one that somebody has turned on.
_OFF = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRTLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_NO = ("", "0", "false", "no", "off")


def without_usage_statistics(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn usage statistics off, beside those that somebody has set.

    Nothing is turned off where `DO_NOT_TRACK` is 0, and what one library's own variable turns on stays on.

    >>> without_usage_statistics({"VLLM_NO_USAGE_STATS": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    {'HF_HUB_DISABLE_TELEMETRY': '1', 'TRTLLM_NO_USAGE_STATS': '1'}
    >>> without_usage_statistics({"DO_NOT_TRACK": "0"})
    {}
    """
    if environment.get(_EVERYBODY, "1").lower() in _NO:
        return {}
    off = {name: value for name, value in _OFF.items() if name not in environment}
    if not any((environment[name].lower() in _NO) == (value == "1") for name, value in _OFF.items() if name not in off):
        off[_EVERYBODY] = environment.get(_EVERYBODY, "1")
    return off
