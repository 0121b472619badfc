"""Whether an error that was raised looks like the machine's fault, and not the input's or the app's.

Such a call is tried on another machine before anybody is blamed. What does not live here: what follows from it
(scheduler/items.py), and what is said of a machine by all that happens there (policies/health/).
"""

from __future__ import annotations

import re

# Compiled by `re` when first needed: most processes never meet an error.
_DEVICE = (
    r"(?i)\bCUDA\b|\bECC\b|\bXid\b|\bNCCL\b|\bcuDNN\b|CUDNN_STATUS|CUBLAS_STATUS|\bHIP error\b|\bNVML\b|"
    r"driver (?:version|is|not|fail|shut)|device (?:is |was )?lost|GPU (?:is |has fallen )?(?:lost|off the bus)|"
    r"No space left|Input/output error|Stale file handle|Read-only file system"
)
_TOO_MUCH = r"(?i)out of memory|ALLOC_FAILED"  # A smaller batch may do, on the same machine.


def looks_like_the_machine(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, is of the kinds that bad machines raise.

    >>> looks_like_the_machine(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    True
    >>> looks_like_the_machine(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    False
    >>> looks_like_the_machine(ModuleNotFoundError("no module named torch")), looks_like_the_machine(KeyError("x"))
    (True, False)
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _looks(cause):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def _looks(error: BaseException) -> bool:
    if isinstance(error, (OSError, ImportError)):
        return True
    try:
        text = str(error)
    except Exception:  # The user's class may say nothing.
        return False
    return bool(re.search(_DEVICE, text)) and not re.search(_TOO_MUCH, text)
