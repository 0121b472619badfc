"""Errors after which an accelerator is of no more use to its process."""

import pickle
import sys
import types

import cloudpickle
import pytest

from ctxflow.errors import ContextLost
from ctxflow.host.device_errors import device_lost
from ctxflow.models.server_process import ServerFailed

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the driver is not at fault."
PROGRAMS = [
    "CUDA error: device-side assert triggered" + ADVICE,
    "CUDA error: an illegal memory access was encountered" + ADVICE,
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA driver error: an illegal memory access",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "HIP error: an illegal memory access was encountered",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "cudaErrorIllegalAddress: an illegal memory access was encountered",
    "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access",
]
MACHINES = [
    "CUDA error: uncorrectable ECC error encountered" + ADVICE,
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: all CUDA-capable devices are busy or unavailable",
    "CUDA error: no CUDA-capable device is detected",
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
]
TOO_MUCH = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory" + ADVICE,
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
]


class AcceleratorError(RuntimeError):
    """As torch has it."""


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


class Accelerator:
    """As `torch.cuda` in a process that uses one of two devices.

    :param broken: what it raises once it is asked.
    """

    def __init__(self, broken=None, used=True):
        self.broken, self.used, self.asked = broken, used, []

    def is_initialized(self):
        return self.used

    def device_count(self):
        return 2

    def memory_reserved(self, device):
        return device == 1

    def synchronize(self, device=None):
        self.asked.append(device)
        if self.broken is not None and device == 1:
            raise self.broken


def torch_with(monkeypatch, accelerator):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=accelerator))
    return accelerator


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def wrapped(error, how):
    try:
        try:
            raise error
        except BaseException as inner:
            if how == "from":
                raise KeyError("row 7") from inner
            if how == "while":
                raise KeyError("row 7")  # noqa: B904 - as users write it
            raise KeyError("row 7") from None
    except KeyError as outer:
        return outer


class Group(Exception):
    def __init__(self, *exceptions):
        super().__init__("some of them failed")
        self.exceptions = exceptions


@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("how", ["plain", "from", "while", "none", "group"])
def test_without_torch_an_error_of_the_program_costs_the_context(text, how):
    error = RuntimeError(text)
    if how != "plain":
        error = Group(KeyError("other"), error) if how == "group" else wrapped(error, how)
    lost = device_lost(error)
    assert isinstance(lost, ContextLost)
    assert text.split("\n")[0] in str(lost) and "\n" not in str(lost)
    assert lost.__cause__ is error


@pytest.mark.parametrize("text", MACHINES + TOO_MUCH)
def test_without_torch_what_may_pass_does_not(text):
    assert device_lost(RuntimeError(text)) is None


@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("torch", ["is not there", "uses no device", "uses one"])
def test_an_error_that_quotes_a_devices_does_not_cost_a_context_that_has_none(monkeypatch, text, torch):
    if torch != "is not there":
        torch_with(monkeypatch, Accelerator(used=torch == "uses one"))
    assert device_lost(RuntimeError(f"the row 'how to mend {text}' has no answer")) is None
    assert device_lost(ServerFailed(text)) is None


@pytest.mark.parametrize("text", PROGRAMS + MACHINES)
def test_the_device_is_asked_where_torch_uses_it(monkeypatch, text):
    works = torch_with(monkeypatch, Accelerator())
    assert device_lost(RuntimeError(text)) is None
    assert works.asked == [None, 1], "a device that is not used would be given memory"
    torch_with(monkeypatch, Accelerator(broken=AcceleratorError(text)))
    assert device_lost(RuntimeError(text)) is not None


@pytest.mark.parametrize("used", [True, False])
def test_torchs_own_type_counts_whatever_it_says(monkeypatch, used):
    torch_with(monkeypatch, Accelerator(AcceleratorError("x"), used=used))
    assert device_lost(AcceleratorError("an access that was not allowed")) is not None


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError(text) for text in TOO_MUCH),
        OutOfMemoryError(TOO_MUCH[0]),
        AcceleratorError("CUDA error: out of memory"),
        ValueError("the row says: CUDA error: device-side assert triggered"),
        MemoryError(),
        KeyboardInterrupt(),
        RuntimeError("Expected all tensors to be on the same device"),
    ],
    ids=repr,
)
def test_other_errors_do_not_even_have_it_asked(monkeypatch, error):
    asked = torch_with(monkeypatch, Accelerator(broken=AcceleratorError("CUDA error: unknown error")))
    assert device_lost(error) is None
    assert asked.asked == []


class Silent(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


def test_an_error_without_words_and_a_circle_are_borne():
    one, other = RuntimeError("one"), Silent()
    one.__cause__, other.__cause__ = other, one
    assert device_lost(one) is None


def failing(text, asked):
    """What builds a model whose calls fail from the first bad one on, and, if torch is `asked`, its device too."""

    def build():
        import sys
        import types

        def synchronize(device=None):
            raise RuntimeError("CUDA error: unknown error")

        class Model:
            bad = False

            def run(self, item):
                self.bad = self.bad or item == "bad"
                if self.bad:
                    raise RuntimeError(text)
                return item

        if asked:
            cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
            cuda.device_count, cuda.memory_reserved = lambda: 1, lambda device: 0
            sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
        return Model()

    return build


@pytest.mark.parametrize(("text", "machine"), [(PROGRAMS[0], False), (MACHINES[0], True)])
@pytest.mark.parametrize("style", ["batch", "item", "apply"])
@pytest.mark.parametrize("told", [False, True], ids=["raised", "told by the function"])
def test_a_host_ends_the_process_and_says_whose_fault_it_looks_like(driven, text, machine, style, told):
    def run(model, *items):
        try:
            return [model.run("bad")]
        except RuntimeError as error:
            if told:
                raise ContextLost("the model failed") from error
            raise

    driven.load(failing(text, machine))
    driven.next("ready")
    driven.tell("function", cloudpickle.dumps(run), function="run")
    body = pickle.dumps({"batch": [["bad"]], "item": ["bad"], "apply": (["bad"], {})}[style])
    driven.tell("call", body, call=7, context="c", function="run", style=style, insert=True)
    head, _ = driven.next("died")
    assert head["calls"] == [7]
    assert (head["failure"]["kind"], head["failure"]["error"]) == ("crash", "ContextLost")
    assert ("the model failed" if told else text.split("\n")[0]) in head["failure"]["message"]
    assert text.split("\n")[0] in head["failure"]["traceback"] and "in run" in head["failure"]["traceback"]
    assert head["failure"]["machine"] == machine


@pytest.mark.parametrize("style", ["batch", "item"])
def test_a_device_is_asked_once_for_each_error(driven, style):
    def build():
        import sys
        import types

        asked = []
        cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: asked.append(1))
        cuda.device_count, cuda.memory_reserved = lambda: 1, lambda device: 0
        sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
        return asked

    def run(asked, item):
        if item in ("bad", ["bad"]):
            raise RuntimeError("CUDA error: device-side assert triggered")
        return [len(asked)]

    driven.load(build)
    driven.next("ready")
    driven.tell("function", cloudpickle.dumps(run), function="run")
    for number, item in enumerate(("bad", "bad", "good")):
        body = pickle.dumps([item] if style == "item" else [[item]])
        driven.tell("call", body, call=number, context="c", function="run", style=style, insert=False)
        _, body = driven.next("raised" if item == "bad" else "finished")
    [found] = pickle.loads(body)
    assert found == (2 if style == "batch" else [2])


def test_an_app_of_parsls_that_returns_its_error_is_no_other(driven):
    def run(model, item):
        from parsl.app.errors import wrap_error

        return wrap_error(model.run)(item)

    driven.load(failing(PROGRAMS[0], False))
    driven.next("ready")
    driven.call(run, ("bad",), {}, context="c", style="apply", insert=True)
    head, _ = driven.next("died")
    assert head["failure"]["error"] == "ContextLost"
