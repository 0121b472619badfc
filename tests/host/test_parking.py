"""What a library process moves where its context is parked; tensors are moved on the CPU as they would be on a GPU."""

import gc
import weakref

import pytest

from ctxflow.host.parking import MovedTensors, Parking, _tensors


class Own:
    def __init__(self, parks=True):
        self.parks, self.calls = parks, []

    def park(self):
        self.calls.append("park")
        return "parked"

    def wake(self):
        self.calls.append("wake")


def test_what_was_built_sees_to_it_itself():
    own = Own()
    parking = Parking(own)
    assert parking.possible
    assert parking.park() == "parked"
    parking.wake()
    assert own.calls == ["park", "wake"]


def test_what_was_built_may_say_that_it_cannot_be_parked():
    assert not Parking(Own(parks=False)).possible


def test_half_a_protocol_is_none():
    class Half:
        def park(self):
            raise AssertionError

    parking = Parking(Half())
    assert parking.possible, "on a machine without a GPU"
    assert parking.park() is parking.wake() is None


@pytest.mark.parametrize("value", [None, {}, object(), 7])
def test_without_a_gpu_nothing_moves(value):
    parking = Parking(value)
    assert parking.possible
    assert parking.park() is parking.wake() is None


def test_tensors_leave_their_place_and_come_back_to_it():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 64))
    tied = torch.nn.Linear(64, 64, bias=False)
    tied.weight = torch.nn.Parameter(torch.arange(64.0 * 64).reshape(64, 64).to(torch.bfloat16))
    part = tied.weight.detach()[3:5, ::2]  # A view, with an offset and strides.
    single = torch.tensor(7)
    empty = torch.empty(0)
    moved = [*model.parameters(), *model.buffers(), tied.weight, tied.weight, part, single, empty]
    before = {id(each): each.detach().clone() for each in moved}
    held = [each.untyped_storage() for each in moved]
    there = MovedTensors(torch, moved)
    assert all(storage.nbytes() == 0 for storage in held), "its memory is free"
    content = weakref.ref(there._content)
    there.put_back()
    gc.collect()
    assert content() is None, "the host's memory is free"
    for each in moved:
        assert torch.equal(each, before[id(each)])
        assert each.requires_grad == (each in set(model.parameters()) or each is tied.weight)
    part.zero_()
    assert tied.weight[3, 0] == 0, "the view is of the same memory"
    model(torch.ones(2, 64)).sum().backward()


def test_a_storage_moves_once_whoever_refers_to_it():
    torch = pytest.importorskip("torch")
    base = torch.arange(1000, dtype=torch.int32)
    there = MovedTensors(torch, [base, base[10:], base.view(10, 100)])
    assert there._content.nbytes == 4000
    there.put_back()
    assert base.sum() == 499_500


def test_there_may_be_nothing_to_move():
    torch = pytest.importorskip("torch")
    MovedTensors(torch, []).put_back()


def test_tensors_are_found_wherever_they_are_and_those_without_memory_are_left():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Holder:
        __slots__ = ("hidden",)

    holder = Holder()
    holder.hidden = [{"here": (torch.ones(3),)}]
    kept = [torch.ones(2, device="meta"), torch.ones(2).to_sparse(), FakeTensorMode().from_tensor(torch.ones(5))]
    found = {id(each) for each in _tensors(torch, "cpu")}
    assert id(holder.hidden[0]["here"][0]) in found
    assert not found & {id(each) for each in kept}
