"""Which errors look like the machine's, and are tried elsewhere first."""

from __future__ import annotations

import errno
import json

import pytest

from ctxflow.host.linux import looks_like_the_machine


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("Found no NVIDIA driver on your system: the driver is not loaded"),
        RuntimeError("GPU has fallen off the bus (Xid 79)"),
        ValueError("write failed: No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        ConnectionResetError("peer"),
        ModuleNotFoundError("No module named 'torch'"),
        ImportError("libcudart.so.12: cannot open shared object file"),
    ],
    ids=str,
)
def test_what_bad_machines_raise(error: Exception) -> None:
    assert looks_like_the_machine(error)
    try:
        raise KeyError("model") from error
    except KeyError as wrapped:
        assert looks_like_the_machine(wrapped), "what it was raised from counts"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("claim"),
        ValueError("no such device in the row"),
        json.JSONDecodeError("Expecting value", "x", 0),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
        AssertionError("the driver licence has expired: secCURE"),
        Silent(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_rows_and_apps_raise(error: BaseException) -> None:
    assert not looks_like_the_machine(error)


def test_a_circle_of_causes_ends() -> None:
    one, other = KeyError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert not looks_like_the_machine(one)
