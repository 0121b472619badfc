"""The recipe `server` in an executor: items in flight, a server that dies, and its end with the run."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from suite.depth import for_release
from waiting import eventually, finished, nothing_left

pytest.importorskip("aiohttp")

from ctxflow import ContextError, ContextExecutor, item_app
from ctxflow.host.linux import descendants
from ctxflow.models import OpenAIServer, server

PLAYED = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('played_server.py')))}"
RECIPE = server(f"{PLAYED} --children 1 --socket {{socket}}")


@item_app(RECIPE)
async def ask(engine: OpenAIServer, body: dict) -> dict:
    """Answer a request; the answer says which process gave it, and where."""
    answer = await engine.answer("/v1/chat/completions", body)
    return {**answer["echo"], "pid": engine.pid, "folder": engine._scratch.path, "library": os.getpid()}


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_rows_are_answered_and_a_server_that_is_killed_is_started_again():
    with ContextExecutor(workers=1) as executor:
        first = ask({"number": -1}).result()
        assert os.path.isdir(first["folder"]) and len(first["folder"]) < 90
        futures = [ask({"number": number}) for number in range(40)]
        os.kill(first["pid"], signal.SIGKILL)
        futures += [ask({"number": number}) for number in range(40, 80)]
        answers = [finished(each).result() for each in futures]
        assert [each["number"] for each in answers] == list(range(80))
        assert {each["model"] for each in answers} == {"base"}
        last = answers[-1]
        assert last["pid"] != first["pid"] and gone(first["pid"])
        nothing_left(lambda: os.path.exists(first["folder"]))
    eventually(lambda: gone(last["pid"]) and gone(last["library"]))
    assert not os.path.exists(last["folder"])
    assert executor


def test_a_library_process_that_is_killed_takes_its_server_along():
    with ContextExecutor(workers=1):
        first = ask({"number": 1}).result()
        os.kill(first["library"], signal.SIGKILL)
        second = finished(ask({"number": 2})).result()
        assert second["library"] != first["library"]
        eventually(lambda: gone(first["pid"]))
        nothing_left(lambda: os.path.exists(first["folder"]))


def test_what_one_row_does_wrong_is_its_own_error():
    with ContextExecutor(workers=1):
        wrong, right = ask({"do": 400}), ask({"number": 2})
        assert right.result()["number"] == 2
        with pytest.raises(Exception, match="refuses the request: so it is"):
            wrong.result()


def test_a_server_that_cannot_start_is_told_with_what_it_printed():
    broken = server(f"{PLAYED} --socket {{socket}} --end 7 --say no-such-weights")

    @item_app(broken)
    async def never(engine, body):
        return body

    with ContextExecutor(workers=1), pytest.raises(Exception, match=r"(?s)exit status 7.*no-such-weights"):
        never(1).result()


@pytest.mark.parametrize(
    ("whose", "seconds"),
    [("library", 0.0), ("server", 1.5), *for_release(("library", 1.5), ("server", 0.0))],
)
def test_what_dies_while_nothing_is_in_flight_is_built_again(whose, seconds):
    with ContextExecutor(workers=1):
        first = ask({"number": 1}).result()
        os.kill(first["library" if whose == "library" else "pid"], signal.SIGKILL)
        time.sleep(seconds)
        second = finished(ask({"number": 2})).result()
        assert second["number"] == 2 and second["pid"] != first["pid"]


@pytest.mark.parametrize("whose", ["library", "server"])
def test_what_dies_while_it_is_built_is_told(whose):
    slow = server(f"{PLAYED} --children 1 --until /nowhere --socket {{socket}}")

    @item_app(slow)
    async def late(engine: OpenAIServer, body: dict) -> dict:
        return (await engine.answer("/v1/chat/completions", body))["echo"]

    with ContextExecutor(workers=1):
        futures = [late({"number": number}) for number in range(3)]
        there = eventually(lambda: [pid for pid in descendants(os.getpid()) if plays(pid)])
        time.sleep(0.5)  # The library process waits for it.
        os.kill(there[0] if whose == "server" else library_of(there[0]), signal.SIGKILL)
        for future in futures:
            with pytest.raises(ContextError, match=r"could not be built.* was killed by SIGKILL"):
                finished(future).result()


def plays(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"played_server.py\0--children" in words and b"warden.py" not in words


def library_of(server: int) -> int:
    """Return the process that started the warden of a server."""
    for _ in range(2):
        server = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    return server
