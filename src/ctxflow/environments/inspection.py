"""Print as JSON what an interpreter says about itself; run as a program by the interpreter of the environment.

This imports nothing but the standard library, since that interpreter may not have ctxflow's own packages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
from typing import Any

_NEEDED = ("ctxflow", "cloudpickle")


def inspect() -> dict[str, Any]:
    """Return where this interpreter's parts lie, what is on its path, and which packages it sees.

    `editable` names the places of packages that are installed as links by setuptools' import hooks; `hooks`, the
    modules of other tools' import hooks, whose places are not known.
    """
    finders = {name: module for name, module in sys.modules.items() if re.search("_editable_|^_editable", name)}
    packages: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # What is left of a broken installation has none.
            packages.setdefault(re.sub("[-_.]+", "-", name).lower(), distribution.version)
    return {
        "python": platform.python_version(),
        "tag": "{}.{}".format(*sys.version_info),
        "machine": platform.machine(),
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "library": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
        "headers": sysconfig.get_path("include"),
        "path": [os.path.abspath(entry) for entry in sys.path if entry],
        "packages": dict(sorted(packages.items())),
        "editable": {
            name: place
            for module in finders.values()
            for name, place in getattr(module, "MAPPING", {}).items()
        },
        "hooks": sorted(name for name, module in finders.items() if not hasattr(module, "MAPPING")),
        "missing": [name for name in _NEEDED if importlib.util.find_spec(name) is None],
    }  # fmt: skip


if __name__ == "__main__":
    del sys.path[0]  # This file's folder.
    json.dump(inspect(), sys.stdout)
