"""Which modules travel with the functions that use them: the user's own, which workers elsewhere do not have.

What does not live here: pickling (context.py).
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from types import ModuleType

import cloudpickle

_seen = 0


def carry_user_modules() -> None:
    """Have cloudpickle send what a function uses of the user's modules along with it.

    The user's modules are those imported from files that are neither Python's own, nor installed packages, nor
    ctxflow. Cheap where nothing was imported since the last time.
    """
    global _seen  # noqa: PLW0603 - cloudpickle's own register is global too
    if len(sys.modules) == _seen:
        return
    _seen = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name not in ("__main__", "__mp_main__") and is_users_own(module):
            cloudpickle.register_pickle_by_value(module)


def is_users_own(module: ModuleType) -> bool:
    """Whether a module is the user's.

    >>> is_users_own(os), is_users_own(cloudpickle)
    (False, False)
    """
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py") or not isinstance(module, ModuleType):
        return False
    return not os.path.realpath(path).startswith(_NOT_THE_USERS)


def _prefixes() -> tuple[str, ...]:
    paths = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    paths |= {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)} - {"/usr", "/", "/usr/local"}
    paths.add("/usr/lib/python3")  # Debian's packages.
    paths.add(os.path.dirname(os.path.dirname(__file__)))  # ctxflow, which every worker has.
    return tuple(os.path.realpath(path) + os.sep for path in paths)


_NOT_THE_USERS = _prefixes()
