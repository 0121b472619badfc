"""Failures by cause."""

import json

import pytest

from ctxflow.observe.history import MOST, Causes, pattern


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("row 3 of 10", "row 41 of 10"),
        ("no file /home/alice/a/b.csv: 3", "no file /scratch/7/c.csv: 4"),
        ("at 0x7f3a object 12", "at 0x9bb1 object 3"),
        ("took 1.5e-3 s", "took 12,000 s"),
        ("job 123e4567-e89b-12d3-a456-426614174000", "job 00000000-e89b-12d3-a456-426614174fff"),
        ("two\n  lines", "two lines"),
    ],
)
def test_numbers_paths_and_ids_do_not_tell_causes_apart(one, other):
    assert pattern(one) == pattern(other)


@pytest.mark.parametrize(("one", "other"), [("no text", "no label"), ("a/b", "a/c"), ("true and/or false", "true")])
def test_words_do(one, other):
    assert pattern(one) != pattern(other)


def failure(message, error="ValueError", kind="exception", **more):
    return {"kind": kind, "error": error, "message": message, **more}


def letter(code, message, **more):
    return json.dumps({"error": {"code": code, "message": message}, **more}).encode() + b"\n"


def test_a_dead_letter_joins_the_calls_that_it_failed_in():
    causes = Causes()
    causes.call(failure("row 1 is empty", traceback="Traceback: here", worker="w1", host="node3"))
    causes.call(failure("the library process died with signal 9", "", "crash", output="Killed"))
    causes.bury(failure("row 1 is empty"), 3)
    lines = [
        letter("ValueError", "row 2 is empty", place="a.csv, row 2 below the header"),
        letter("RemoteError", "ValueError: row 7 is empty"),
        letter("CallCrashed", "the library process died with signal 11"),
        letter("InvalidRow", "no JSON object", place="line 4", traceback=""),
        b"not JSON\n", b'{"error": null}\n', b"[]\n",
    ]  # fmt: skip
    causes.dead_letters(lines)
    found = {cause.error: cause for cause in causes.ordered()}
    assert set(found) == {"ValueError", "crash", "InvalidRow"}
    empty = found["ValueError"]
    assert (empty.calls, empty.items, empty.rows) == (1, 3, 2)
    assert (empty.where, empty.place) == ("worker w1 on node3", "a.csv, row 2 below the header")
    assert (empty.message, empty.traceback) == ("row 1 is empty", "Traceback: here")
    assert (found["crash"].rows, found["crash"].output) == (1, "Killed")
    assert causes.ordered()[0] is empty


def test_there_are_not_more_causes_than_can_be_held():
    causes = Causes()
    for n in range(2 * MOST):
        causes.call(failure(f"nothing like {chr(97 + n % 26) * (1 + n // 26)}"))
    assert len(causes.found) == MOST + 1
    assert sum(cause.calls for cause in causes.ordered()) == 2 * MOST
    assert causes.ordered()[0].error == "other causes"
