"""Every message between driver, hosts and library processes: it says what it is for, and arrives as it was sent."""

import dataclasses
from typing import get_args

import pytest

from ctxflow.executors.taskvine import manager_messages
from ctxflow.host import library_messages, messages
from ctxflow.host.wire import Direction, Trouble, pack, unframe

DIRECTIONS = [
    library_messages.ToLibrary,
    library_messages.FromLibrary,
    library_messages.Answer,
    messages.ToHost,
    messages.FromHost,
    messages.ToWorker,
    messages.FromWorker,
    manager_messages.ToManager,
    manager_messages.FromManager,
]
CASES = [(union, kind) for union in DIRECTIONS for kind in get_args(union)]
SAMPLES = {"body": b"\0pickle", "trouble": Trouble("exception", "OSError", "no", "", "last words", True)}


def sample(kind):
    """A message with something in each field, of what JSON has."""
    fields = dataclasses.fields(kind)
    return kind(**{field.name: SAMPLES.get(field.name, [field.name, 7]) for field in fields})


@pytest.mark.parametrize(("union", "kind"), CASES, ids=[kind.__name__ for _, kind in CASES])
def test_a_message_arrives_as_it_was_sent(union, kind):
    message = sample(kind)
    [(head, body)] = unframe(pack(message))
    opened = Direction(union).open(head, body)
    assert type(opened) is kind and opened == message and hash(opened) == hash(message)
    assert body == message.body


@pytest.mark.parametrize("kind", {kind for _, kind in CASES}, ids=lambda kind: kind.__name__)
def test_each_is_frozen_and_says_what_it_is_for(kind):
    message = sample(kind)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, 0)
    assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__ + "(")


@pytest.mark.parametrize(
    "head",
    [["FilesStaged", "c"], ["Dance"], [], [7], [["RunCall"]], {}, {"is": "call"}, ["RunCall"], ["EndLibrary"] * 9],
)
def test_what_may_not_come_there_is_no_message(head):
    """A report is none of the instructions, whoever sends it."""
    with pytest.raises(ValueError, match="no message that may come here"):
        messages.TO_HOST.open(head, b"")
