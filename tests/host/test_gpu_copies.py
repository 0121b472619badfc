"""Copies between the host and a device: on the CPU they take the same way, but for streams and pinned memory."""

import pytest

from ctxflow.host import gpu_copies
from ctxflow.host.gpu_copies import as_bytes, copy_bytes, host_bytes

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(gpu_copies, "_PIECE", 1000)


@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("sizes", [[1], [999, 1000, 1001], [0, 12_345, 0, 7], [3] * 200, [250_000]])
def test_every_byte_arrives(monkeypatch, sizes, to_host, few):
    monkeypatch.setattr(gpu_copies, "_FEW", few)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size + 2, dtype=torch.uint8) for size in sizes]
    copy_bytes(torch, [(a, b[1:-1]) for a, b in zip(sources, targets, strict=True)], to_host=to_host)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target[1:-1])
        assert target[0] == target[-1] == 0, "nothing beside it"


def test_there_may_be_nothing_to_copy():
    copy_bytes(torch, [], to_host=True)


def test_what_fails_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(gpu_copies, "_FEW", 0)

    def fails(*args):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(gpu_copies._Buffer, "_begin", fails)
    with pytest.raises(RuntimeError, match="gone"):
        copy_bytes(torch, [(torch.ones(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8))], to_host=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
def test_a_tensor_and_its_bytes_are_one_memory(dtype):
    whole = torch.zeros(4, 6, dtype=dtype)
    part = whole[2:3]
    content = as_bytes(torch, part)
    assert (content.dtype, content.shape, content.data_ptr()) == (torch.uint8, (part.nbytes,), part.data_ptr())
    assert as_bytes(torch, torch.tensor(1.0)).shape == (4,)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_new_memory_of_the_host_is_of_its_size(size):
    memory = host_bytes(torch, size)
    assert (memory.dtype, memory.shape) == (torch.uint8, (size,))
    assert torch.equal(memory.fill_(7), torch.full((size,), 7, dtype=torch.uint8))
