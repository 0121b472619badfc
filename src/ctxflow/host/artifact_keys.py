"""Which artifacts (artifacts.py) a load has, and what they depend on, whose digest is the key they are kept by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

from ctxflow.host.installed_modules import is_installed
from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_start import interpreter, library_variables

OWN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Variables that name folders of compile caches: each is an artifact, unless somebody has set it."""
PACKED = "CTXFLOW_PACKED"
"""The variable with the digest of the packed environment that a worker has opened: it is the same at any path."""
_VERSION = 1
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
# Variables of the worker, beside those of the context, on which it depends what compilers make.
_COMPILING = re.compile(r"(TORCH|TRITON|VLLM|CUDA_HOME|CUDA_PATH|OMP_NUM|MKL_|CC$|CXX$|C\w*FLAGS$|LD_).*")


def is_variable(target: str) -> bool:
    """Return whether an artifact is a folder that a variable names, not one that is named itself.

    >>> is_variable("TRITON_CACHE_DIR"), is_variable("engine/cache")
    (True, False)
    """
    return _VARIABLE.fullmatch(target) is not None


def folders_of(load: BuildContext, scratch: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the folder of each artifact of a load, by its name, and the variables that name some of them.

    :param scratch: the library process's directory.
    """
    there = library_variables(load.environment)
    named = dict(load.artifacts or {})
    own = {name: name for name in OWN if name not in there and name not in named.values()}
    places, variables = {}, {}
    for name, target in {**own, **named}.items():
        if is_variable(target):
            places[name] = variables[target] = os.path.join(scratch, "artifacts", name)
        else:
            places[name] = os.path.join(load.directory or scratch, target)
    return places, variables


def key_of(load: BuildContext) -> str:
    """Return what the artifacts of a load are kept by here."""
    return digest_of(context_facts(load), machine_facts())


def digest_of(*facts: Mapping[str, object]) -> str:
    """Return the digest of facts, which depends on each of them."""
    text = json.dumps([_VERSION, *facts], sort_keys=True, default=list)
    return f"artifacts-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def context_facts(load: BuildContext) -> dict[str, object]:
    """Return what a load's artifacts depend on of the recipe, its variables, the Python and its packages."""
    variables = library_variables(load.environment)
    python = interpreter()
    path = load.path if load.path or os.environ.get("CTXFLOW_PYTHON") else sys.path
    others = [value for name, value in sorted(variables.items()) if name.startswith("CTXFLOW_") and "PYTHON" in name]
    path = [*path, *(folder for other in others for folder in _packages_of(other))]
    return {
        "context": load.context,
        "artifacts": load.artifacts,
        "variables": {
            name: value for name, value in variables.items() if _COMPILING.fullmatch(name) or name in load.environment
        },
        "python": [os.environ.get(PACKED) or os.path.realpath(python), sys.version if python == sys.executable else ""],
        "packages": _distributions(path),
    }


def _packages_of(python: str) -> list[str]:
    """Return the folders of another Python's packages."""
    libraries = os.path.join(os.path.dirname(os.path.dirname(python)), "lib")
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(libraries)):
            if name.startswith("python"):
                found.append(os.path.join(libraries, name, "site-packages"))
    return found


def _distributions(path: Sequence[str]) -> list[str]:
    """Return name and version of each installed package, as its folder says."""
    found: set[str] = set()
    for entry in path:
        if is_installed(entry):
            with contextlib.suppress(OSError):
                found.update(name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info")))
    return sorted(found)


def machine_facts(root: str = "/") -> dict[str, object]:
    """Return what artifacts depend on of the machine: its instruction set, its GPUs and their driver."""
    models = sorted(
        {
            line.partition(":")[2].strip()
            for text in _texts(root, "proc/driver/nvidia/gpus", "information")
            for line in text.splitlines()
            if line.startswith("Model")
        }
    )
    models += sorted(
        {
            line
            for text in _texts(root, "sys/class/kfd/kfd/topology/nodes", "properties")
            for line in text.splitlines()
            if line.startswith("gfx_target_version") and not line.endswith(" 0")
        }
    )
    flags = ""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(root, "proc/cpuinfo")) as file:
        for line in file:  # No further than the first processor: there may be hundreds.
            if line.partition(":")[0].strip() in ("flags", "Features", "isa"):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    return {
        "machine": platform.machine(),
        "flags": flags,
        "gpus": models,
        # Where GPUs differ, that which one a process has tells which it is.
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "") if len(models) > 1 else "",
        "drivers": [
            _text(os.path.join(root, "proc/driver/nvidia/version")).partition("\n")[0],
            _text(os.path.join(root, "sys/module/amdgpu/version")),
        ],
    }


def _text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return file.read()
    return ""


def _texts(root: str, folder: str, name: str) -> list[str]:
    folder = os.path.join(root, folder)
    with contextlib.suppress(OSError):
        return [_text(os.path.join(folder, each, name)) for each in sorted(os.listdir(folder))]
    return []
