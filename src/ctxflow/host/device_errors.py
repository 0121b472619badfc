"""Whether an accelerator is of no more use to this process after an error, as after a device-side assert of CUDA's.

Such an error is sticky: each call of the device fails from then on, until the process ends. So what was built here is
lost, and what raised it is accused as one that kills its process: on another worker it would end that one's context.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from ctxflow.errors import ContextLost, CtxflowError

_LIBRARIES = "cuda|hip|xpu|npu|cudnn|cublas|cufft|cusparse|cusolver|miopen|nccl|rccl|triton"
_DEVICE_ERROR = (
    rf"(?:\b(?:{_LIBRARIES})[ _]?(?:(?:driver|runtime|internal) )?error|\b(?:CU|HIP)[A-Z]+_STATUS_|"
    r"device-side assert|illegal memory access)"
)
_ITSELF = rf"\A(?:[A-Z]+: )?{_DEVICE_ERROR}"  # What others quote stands further behind.
_TYPES = {"AcceleratorError", "CudaAPIError", "CUDADriverError", "CUDARuntimeError"}  # Of torch, numba and cupy.
_OUT_OF_MEMORY = r"(?i)out[ _]?of[ _]?memory|memory ?allocation|ALLOC_FAILED"
# What the machine is to blame for: it costs the context only where the device says so itself.
_MACHINES = (
    r"(?i)\bECC\b|\bXid\b|\bNVLink\b|\bNCCL\b|\bRCCL\b|off the bus|(?:device|GPU)[a-z ]* lost|no [a-z-]*[ -]?device|"
    r"driver (?:version|is|not|fail|shut)|kernel image|unavailable|initiali[sz]|not supported|invalid device"
)
_ASKED = ("cuda", "xpu", "npu")
_LONGEST = 500  # Characters of an error that are shown.


def device_lost(error: BaseException) -> ContextLost | None:
    """Return what to raise in place of an error after which this process cannot use its accelerator; None after others.

    Errors of accelerators but for a lack of memory are looked at, also those from which, or while which was handled,
    the error was raised. Then torch is asked whether the device still works. Where torch does not use one here, the
    error's text has to do: it counts as sticky if it begins as accelerators' errors do, and does not name what the
    machine is to blame for.

    >>> device_lost(RuntimeError("CUDA error: device-side assert triggered")) is None
    False
    >>> device_lost(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), device_lost(KeyError("CUDA error"))
    (None, None)
    """
    text = _said(error, _DEVICE_ERROR)
    works = _works() if text else True
    if works is None:
        text = _said(error, _ITSELF)
    if works or not text or (works is None and _names_the_machine(text)):
        return None
    said = text.split("\n", 1)[0][:_LONGEST]  # Behind it torch gives advice.
    lost = ContextLost(f"the accelerator is of no more use to this process after an error in a call: {said}")
    lost.__cause__ = error
    return lost


def machines_fault(error: BaseException) -> bool:
    """Return whether an accelerator's error, or one behind it, names what its machine is to blame for, and no program.

    >>> machines_fault(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    True
    >>> machines_fault(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    return _names_the_machine(_said(error, _DEVICE_ERROR))


def _names_the_machine(text: str) -> bool:
    return bool(re.search(_MACHINES, text.partition("\n")[0]))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, those behind it, and those of groups."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _said(error: BaseException, pattern: str) -> str:
    """Return what the first accelerator's error says of an error and those behind it; "" if there is none."""
    return next((text for each in _chain(error) if (text := _device_error(each, pattern))), "")


def _device_error(error: BaseException, pattern: str) -> str:
    """Return what an accelerator's error says; "" for another, and for a lack of memory."""
    typed = any(kind.__name__ in _TYPES for kind in type(error).__mro__)
    # Others may quote a row's text, and ctxflow's own what a server says.
    if not typed and (isinstance(error, CtxflowError) or not isinstance(error, RuntimeError)):
        return ""
    try:
        text = str(error)
    except Exception:  # The user's class may say nothing.
        return ""
    if not typed and not re.search(pattern, text, re.IGNORECASE):
        return ""
    return "" if re.search(_OUT_OF_MEMORY, text.partition("\n")[0]) else text or type(error).__name__


def _works() -> bool | None:
    """Return whether the accelerators that torch uses in this process still work; None if it uses none."""
    torch = sys.modules.get("torch")
    used = [] if torch is None else [getattr(torch, name, None) for name in _ASKED]
    asked = [each for each in used if each is not None and each.is_initialized()]
    try:
        for each in asked:
            _synchronize(each)
    except Exception:
        return False
    return True if asked else None


def _synchronize(accelerator: Any) -> None:
    """Wait for all that this process runs on its devices, as `torch.cuda`; raise what they raise."""
    accelerator.synchronize()
    for device in range(accelerator.device_count()):
        if accelerator.memory_reserved(device):  # To ask another would take memory there.
            accelerator.synchronize(device)
