"""Servers that are started, asked, killed and ended: a small program that can do everything wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waiting import eventually_async, exited, gone, nothing_left

pytest.importorskip("aiohttp")

from ctxflow.errors import ContextLost, ItemRefused
from ctxflow.host.linux import descendants
from ctxflow.models import openai_server
from ctxflow.models.openai_engine import CHAT, EMBEDDINGS, OpenAIEngine
from ctxflow.models.openai_server import start_server
from ctxflow.models.server_process import Redaction, ServerFailed, free_port, listening_sockets

PLAYED = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('played_server.py')))}"
AT_SOCKET = f"{PLAYED} --socket {{socket}}"
AT_PORT = f"{PLAYED} --port {{port}} --key-file {{key_file}}"


@pytest.fixture(autouse=True)
def kept_ports(monkeypatch):
    """Keep ports from other processes until servers listen there: they stay bound, with SO_REUSEADDR."""
    with contextlib.ExitStack() as kept:

        def port_for_us():
            bound = kept.enter_context(socket.socket())
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", 0))
            return bound.getsockname()[1]

        monkeypatch.setattr(openai_server, "free_port", port_for_us)
        yield


@contextlib.asynccontextmanager
async def served(command=AT_SOCKET, **settings):
    server = await start_server(command, **settings)
    try:
        yield server
    finally:
        folder = server._scratch.path
        pids = family(server)
        await server.aclose()
        assert not os.path.exists(folder)
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def family(server):
    warden = server._process._warden
    return [] if warden.returncode is not None else [warden.pid, *descendants(warden.pid)]


@pytest.mark.parametrize(
    "command", [AT_SOCKET, AT_PORT, f"{PLAYED} --port {{port}}"], ids=["socket", "file", "variable"]
)
def test_a_server_answers_at_a_socket_and_at_a_port(command):
    async def main():
        settings = {"key": "PLAYED_KEY"} if "key_file" not in command and "socket" not in command else {}
        async with served(command, **settings) as server:
            assert isinstance(server, OpenAIEngine) and server.models == ("base", "adapter")
            assert os.stat(server._scratch.path).st_mode & 0o777 == 0o700
            answers = await asyncio.gather(*(server.answer(CHAT, {"number": number}) for number in range(50)))
            assert [each["echo"] for each in answers] == [{"model": "base", "number": number} for number in range(50)]
            assert (await server.answer(EMBEDDINGS, {"model": "adapter"}))["echo"] == {"model": "adapter"}
            lines = Path(f"/proc/{server.pid}/cmdline").read_text()
            secret = server._process._redaction._secret
            assert not secret or secret not in lines

    asyncio.run(main())


def test_a_server_gets_no_request_that_it_would_follow_and_the_only_model_answers_for_all_where_that_was_asked():
    async def main():
        async with served() as server:
            with pytest.raises(ItemRefused, match="an image at an address"):
                part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
                await server.answer(CHAT, {"messages": [{"role": "user", "content": [part]}]})

            async def answered_by(name):
                return (await server.answer(CHAT, {"number": 1, "model": name}))["echo"]["model"]

            server.answers_any_name = True
            assert await answered_by("other") == "other", "it has two, and knows itself"
            server.models = ("base",)
            assert await answered_by("other") == "base"
            server.answers_any_name = False
            assert await answered_by("other") == "other"

    asyncio.run(main())


def test_long_requests_are_judged_beside_the_event_loop(monkeypatch):
    judged, hazard = {}, openai_server.hazard

    def watched(endpoint, body):
        judged[body["number"]] = threading.current_thread()
        return hazard(endpoint, body)

    monkeypatch.setattr(openai_server, "hazard", watched)

    async def main():
        async with served() as server:
            for number, text in enumerate(["short", "long " * 10_000]):
                asked = {"number": number, "messages": [{"role": "user", "content": text}]}
                assert (await server.answer(CHAT, asked))["echo"]["messages"] == asked["messages"]

    asyncio.run(main())
    assert [each is threading.main_thread() for each in judged.values()] == [True, False]


def test_errors_of_a_request_are_sentences():
    async def main():
        async with served() as server:
            for status, said, sentence in [
                (400, {"error": {"message": "no such field"}}, "refuses the request: no such field"),
                (422, {"detail": [{"msg": "Field required"}]}, "Field required"),
                (413, {"error": "too long", "error_type": "validation"}, "too long"),
                (404, {"object": "error", "message": "the model x does not exist"}, "the model x does not exist"),
                (404, {"detail": "Not Found"}, "does not answer /v1/chat/completions as it was started"),
                (501, {"error": {"message": "start it with --embeddings"}}, "start it with --embeddings"),
            ]:
                with pytest.raises(ItemRefused, match=sentence):
                    await server.answer(CHAT, {"do": status, "said": said})
            with pytest.raises(ItemRefused, match="leave stream out"):
                await server.answer(CHAT, {"stream": True})
            with pytest.raises(ItemRefused, match="give one of /v1/chat"):
                await server.answer("/v1/models", {})
            with pytest.raises(ItemRefused, match="no JSON data"):
                await server.answer(CHAT, {"what": object()})
            with pytest.raises(ServerFailed, match=r"failed at the request \(500\): so it is"):
                await server.answer(CHAT, {"do": 500})
            with pytest.raises(ServerFailed, match="no JSON object"):
                await server.answer(CHAT, {"do": "rubbish"})
            with pytest.raises(ServerFailed, match="broke off the connection"):
                await server.answer(CHAT, {"do": "drop"})
            assert await server.answer(CHAT, {"do": "drop-once"})
            assert await server.answer(CHAT, {"do": "busy"})
            assert (await server.answer(CHAT, {"nan": None}))["nan"] is None

    asyncio.run(main())


@pytest.mark.parametrize("status", [408, 425])
def test_a_request_that_takes_too_long_is_sent_three_times(status):
    async def main():
        async with served() as server:
            with pytest.raises(ItemRefused, match="refuses the request: so it is"):
                await server.answer(CHAT, {"do": status})
            assert (await server.answer(CHAT, {"do": "count", "of": status}))["tries"] == 3

    asyncio.run(main())


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_for_one_request_alone_fails_at_it_and_says_what_it_waits_for(
    monkeypatch, capsys, status
):
    monkeypatch.setattr(openai_server, "_MINUTE", 0.1)
    monkeypatch.setattr(openai_server, "_BUSY_SECONDS", 0.02)
    monkeypatch.setattr(openai_server, "_BUSY_TRIES", 10)
    told = f"is busy: 1 request waits for it, one for 0 s; it answers {status}: so it is]"

    async def main():
        async with served() as server:
            alone = asyncio.ensure_future(server.answer(CHAT, {"do": status}))
            await eventually_async(lambda: told in capsys.readouterr().out)
            assert not alone.done(), "nobody is answered: it may pass"
            others = 0
            while not alone.done():
                assert await server.answer(CHAT, {})
                others += 1
            sentence = rf"answered this request {status} for .*, and others that were sent later were answered"
            with pytest.raises(ServerFailed, match=sentence):
                await alone
            assert others >= openai_server._BUSY_OTHERS and server.waiting == 0
            monkeypatch.setattr(openai_server, "_ALONE_SECONDS", 0.1)
            with pytest.raises(ServerFailed, match=rf"answered this request {status} .* no other was answered either"):
                await server.answer(CHAT, {"do": status})

    asyncio.run(main())


@pytest.mark.parametrize(("slots", "window"), [(1, 8), (3, 8), (8, 64)])
def test_rows_at_a_server_that_takes_few_at_once_are_all_answered_but_the_one_that_it_always_refuses(
    monkeypatch, slots, window
):
    monkeypatch.setattr(openai_server, "_BUSY_SECONDS", 0.005)
    monkeypatch.setattr(openai_server, "_BUSY_TRIES", 10)

    async def main():
        async with served() as server:
            there, at_once = 0, asyncio.Semaphore(window)

            async def post(endpoint, data):
                nonlocal there
                if there == slots or b"poison" in data or (b"unlucky" in data and there):
                    return types.SimpleNamespace(status=429, json=lambda: None, body=b"full")
                there += 1
                await asyncio.sleep(0.002)
                there -= 1
                return types.SimpleNamespace(status=200, json=dict)

            async def asked(number):
                async with at_once:
                    return await server.answer(CHAT, {"prompt": {20: "poison", 30: "unlucky"}.get(number, "row")})

            monkeypatch.setattr(server._client, "post", post)
            answers = await asyncio.gather(*map(asked, range(400)), return_exceptions=True)
            failed = [number for number, answer in enumerate(answers) if answer != {}]
            assert failed == [20] and isinstance(answers[20], ServerFailed)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("death", "sentence"), [("die", "was killed by SIGKILL"), ("leave", "ended with exit status 3")]
)
@pytest.mark.parametrize("command", [AT_SOCKET, AT_PORT], ids=["socket", "port"])
def test_a_server_that_dies_loses_what_is_in_flight(death, sentence, command):
    async def main():
        async with served(f"{command} --children 2") as server:
            pids = family(server)
            hanging = [asyncio.ensure_future(server.answer(CHAT, {"do": "hang"})) for _ in range(5)]
            await eventually_async(lambda: server._in_flight == 5)
            results = await asyncio.gather(server.answer(CHAT, {"do": death}), *hanging, return_exceptions=True)
            assert {type(each) for each in results} == {ContextLost}
            assert sentence in str(results[0]) and "about to" in str(results[0])
            with pytest.raises(ContextLost, match=sentence):
                await server.answer(CHAT, {})
            await eventually_async(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids[1:]))

    asyncio.run(main())


@pytest.mark.parametrize("whose", ["server", "warden"])
def test_killed_from_outside_while_idle_it_is_lost(whose):
    async def main():
        async with served(f"{AT_SOCKET} --children 2") as server:
            pids = family(server)
            os.kill(pids[0] if whose == "warden" else server.pid, signal.SIGKILL)
            await asyncio.to_thread(gone, server.pid)
            with pytest.raises(ContextLost, match="was killed"):
                await server.answer(CHAT, {})

    asyncio.run(main())


def test_a_stopped_server_is_noticed():
    async def main():
        async with served(unresponsive_seconds=6) as server:
            os.kill(server.pid, signal.SIGSTOP)
            await eventually_async(server._process.stopped)
            with pytest.raises(ContextLost, match=r"has not answered for 6 s or more.* while 1 request was in flight"):
                await server.answer(CHAT, {})

    asyncio.run(main())


def test_a_server_that_computes_is_not_given_up_where_its_health_has_no_answer():
    async def main():
        async with served(unresponsive_seconds=5) as server:
            asked = asyncio.ensure_future(server.answer(CHAT, {"do": "compute", "seconds": 7}))
            await eventually_async(lambda: server._in_flight)
            process = server._process
            assert not process.stopped() and process.processor_seconds() > 0
            silence = asyncio.Future()
            server._client.get = lambda path, seconds: asyncio.wait_for(asyncio.shield(silence), seconds)
            assert (await asked)["echo"]["seconds"] == 7
            silence.cancel()

    asyncio.run(main())


def test_cancelled_requests_close_their_connections():
    async def main():
        async with served() as server:
            task = asyncio.ensure_future(server.answer(CHAT, {"do": "hang"}))
            await eventually_async(lambda: server._in_flight)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not server._client._session.connector._acquired and server._in_flight == 0
            assert await server.answer(CHAT, {})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "settings", "sentence"),
    [
        ("no-such-program {socket}", {}, "could not be started: No such file or directory"),
        (f"{AT_SOCKET} --end 4 --say wrong-weights", {}, r"exit status 4 before it could serve.*:\nwrong-weights"),
        (f"{AT_SOCKET} --health", {}, "unrecognized arguments: --health"),
        (AT_SOCKET, {"health": "/nothing"}, "has no /nothing: give health="),
        (f"{PLAYED} --port {{port}}", {"key": "ANOTHER"}, "does not take its key"),
    ],
)
def test_a_server_that_does_not_start_says_why(command, settings, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("CTXFLOW_LIBRARY_SCRATCH", str(tmp_path))

    async def main():
        with pytest.raises(ServerFailed, match=rf"(?s){sentence}"):
            await start_server(command, **settings)

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_a_slow_start_is_awaited_and_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(openai_server, "_TELL_SECONDS", 0.3)
    told = re.compile(r"has been starting for \d+ s; it last printed: reading-weights")

    async def main():
        async with served(f"{AT_SOCKET} --until {tmp_path}/go --say reading-weights") as server:
            assert await server.answer(CHAT, {})

    async def ready_once_told():
        running = asyncio.ensure_future(main())
        await eventually_async(lambda: running.done() or told.search(capsys.readouterr().out))
        assert not running.done()
        (tmp_path / "go").touch()
        await running

    asyncio.run(ready_once_told())


def test_a_cancelled_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CTXFLOW_LIBRARY_SCRATCH", str(tmp_path))

    async def main():
        others = set(descendants(os.getpid()))  # Of tests before this one.
        starting = asyncio.ensure_future(start_server(f"{AT_SOCKET} --until /nowhere --children 1"))
        pids = await eventually_async(lambda: len(found := set(descendants(os.getpid())) - others) >= 3 and found)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.to_thread(nothing_left, lambda: [pid for pid in pids if os.path.exists(f"/proc/{pid}")])

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_a_stranger_who_listens_first_gets_neither_key_nor_rows(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        stranger.settimeout(1.0)
        monkeypatch.setattr(openai_server, "free_port", lambda: port)

        async def main():
            other = free_port()
            with pytest.raises(ServerFailed, match=rf"port {port} .* was taken by a process that is none of it"):
                await start_server(f"{AT_PORT} --elsewhere {other}")

        asyncio.run(main())
        with pytest.raises(TimeoutError):
            stranger.accept()


def test_a_stranger_who_listens_later_gets_neither_key_nor_rows(monkeypatch):
    async def main():
        async with served(AT_PORT) as server:
            port = server._port
            assert await server.answer(CHAT, {})
            assert server._process.listeners(port) == (listening_sockets(port), True)
            # As if another process had taken the port that the server had given up.
            monkeypatch.setattr(server._process, "note_family", list)
            with pytest.raises(ContextLost, match=f"does not listen at port {port} any more"):
                await asyncio.gather(*(server.answer(CHAT, {}) for _ in range(5)))  # On new connections, too.

    asyncio.run(main())


def test_a_deaf_server_and_its_helpers_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("ctxflow.models.server_process._END_SECONDS", 0.3)

    async def main():
        async with served(f"{AT_SOCKET} --deaf --children 3") as server:
            assert len(family(server)) == 5
        await server.aclose()
        with pytest.raises(ContextLost, match="ended with its context"):
            await server.answer(CHAT, {})

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left_when_the_library_process_is_killed(number, tmp_path):
    program = textwrap.dedent(f"""
        import asyncio
        from ctxflow.models.openai_server import start_server
        async def main():
            server = await start_server({f"{AT_SOCKET} --children 2"!r})
            print("pid", server.pid, server._process._warden.pid, server._scratch.path, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    library = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with library:
        words = next(line for line in library.stdout if line.startswith("pid")).split()
        pids = [library.pid, int(words[2]), *descendants(int(words[2]))]
        assert len(pids) == 5
        library.send_signal(number)
        assert exited(library) == -number
        nothing_left(lambda: [pid for pid in pids[1:] if os.path.exists(f"/proc/{pid}")])
        assert not os.path.exists(words[3])


@pytest.mark.parametrize("secret", ["a", "key-0123456789", "aaab", "abababc"])
@given(data=st.data())
def test_a_secret_is_redacted_wherever_reads_cut_the_text(secret, data):
    """As it is where the text comes at once; and none of the parts shows more of it than a few characters."""
    text = "".join(data.draw(st.lists(st.sampled_from([secret, secret[:-1], secret[0], "x", "\n", "*"]), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    redaction = Redaction(secret)
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = "".join(redaction.redact(part) for part in parts) + redaction.redact("", final=True)
    whole = text.replace(secret, "***")
    rest = next((secret[:n] for n in range(len(secret) - 1, 3, -1) if whole.endswith(secret[:n])), "")
    assert shown == whole.removesuffix(rest) + "***" * bool(rest)
