"""An engine that is a server: any command that serves OpenAI's API, started, awaited, asked and ended.

`start_server` is what the recipe `ctxflow.models.server` runs. The server is a child of the library process; only its
user can reach it, at a UNIX socket or by a key, and nothing is sent before it was seen to be ours.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.errors import ContextLost, ItemRefused, counted, short
from ctxflow.host.local_files import OF_LIBRARY, Scratch
from ctxflow.models.model_folder import locate_model
from ctxflow.models.openai_engine import ENDPOINTS, aside
from ctxflow.models.openai_requests import hazard
from ctxflow.models.results import MissingPackageError
from ctxflow.models.server_command import ServerCommand, option_words, read_command
from ctxflow.models.server_process import ServerFailed, ServerProcess, free_port
from ctxflow.models.vllm_options import memory_share, plain_names
from ctxflow.on_worker import load_part

if TYPE_CHECKING:
    from ctxflow.models.server_client import Answer, Client

_LONGEST_FOLDER = 67  # Bytes of 107 for a UNIX socket's path, so that servers may have sockets beside ours.
_TELL_SECONDS = 30.0  # How often a long start is told.
_LOOKS = 6  # How often in a row a server must not answer before it is given up: it may have been suspended with us.
_BUSY_SHARE = 0.05  # Of a core: who takes more computes,
_PART_OF_BUSY = 0.1  # and is waited for ten times as long.
_LATE = (408, 425)  # What may pass: a request that took too long, or came too early,
_LATE_TRIES = 3
_BUSY = (429, 503)  # and what passes, but for a request that is refused so while others are answered.
_BUSY_SECONDS = 5.0  # The longest pause before such a request is sent again.
_BUSY_TRIES = 100  # After which one is sent alone, and given up, in eight minutes or more, if meanwhile
_BUSY_OTHERS = 20  # so many were answered that were sent later; or, if there are no others,
_ALONE_SECONDS = 1800.0  # when nobody was answered for so long.
_MINUTE = 60.0
_GROWTH = 0.25  # By how much the number of requests that a busy server gets at once grows with each answer.
_DEATH_SECONDS = 1.0  # How long a failing server is watched for its end.
_SENTENCE = 1000  # Characters of what a server says.


async def start_server(
    command: str | Sequence[str], *, model: str | os.PathLike[str] | None = None, **settings: Any
) -> OpenAIServer:
    """Start a server and return it once it is healthy; see `ctxflow.models.server` for the parameters.

    Its log is copied to this process's output; a start that takes long is told every 30 s.

    :raises UsageError: for a command that cannot be started, or not safely.
    :raises MissingPackageError: where the HTTP client is not installed.
    :raises ServerFailed: if it ended, or somebody else listens in its place, with its last lines.
    """
    read = read_command(command, model=model, **settings)
    try:
        from ctxflow.models.server_client import Client
    except ImportError as error:
        raise MissingPackageError.about("aiohttp", extra="server", why=error) from error
    try:
        scratch = _scratch()
    except OSError as error:
        raise ServerFailed(f"{read.name} has no place for its socket: {error}") from error
    started: OpenAIServer | None = None
    try:
        by_file = any("{key_file}" in word for word in read.arguments)
        key = secrets.token_urlsafe(32) if read.key or by_file else ""
        port = 0 if read.at_socket else free_port()
        folder = scratch.path if len(os.fsencode(scratch.path)) <= _LONGEST_FOLDER else scratch.short_name()
        path = os.path.join(folder, "api.sock") if read.at_socket else None
        places = {"socket": path or "", "port": str(port), "folder": folder, "model": _model(model)}
        places["key_file"] = os.path.join(folder, "key.yaml")
        if by_file:
            with open(os.open(places["key_file"], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(read.key_text.replace("{key}", key))
        environment = {**os.environ, **read.environment(places, key)}
        words = read.filled(places)
        if read.name == "vllm":
            words += option_words(memory_share(plain_names({word.partition("=")[0]: True for word in words})))
        process = ServerProcess(read.name, words, environment, scratch.path, key)
        client = Client(path, port, key, lambda: process.listeners(port)[1])
        started = OpenAIServer(read, process, client, scratch, port)
        with load_part("server"):
            await process.started
            await started.be_ready()
    except BaseException:
        if started is not None:
            await asyncio.shield(started.aclose())
        scratch.close()
        raise
    return started


def _scratch() -> Scratch:
    """Return a folder in that of this library process, which goes with its worker, whatever is killed."""
    base = os.environ.get(OF_LIBRARY)
    return Scratch(base if base and os.path.isdir(base) else None)


def _model(model: str | os.PathLike[str] | None) -> str:
    """Return what the server is told: a local path where there is one, or else the name as it is."""
    if model is None:
        return ""
    name = os.fspath(model)
    if name.startswith("package:"):
        return str(locate_model(name))
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


class OpenAIServer:
    """A server that runs, as an `OpenAIEngine`: as many requests at once as its caller has in flight.

    Made by `start_server`.

    :ivar name: what kind of server it is.
    :ivar models: what may be given as a request's "model": the base model first, then its adapters.
    :ivar answers_any_name: whether a request for another model is for the only one that there is.
    :ivar served: how many requests it has answered; `served_at`, when it did last; `waiting`, for how many it is busy.
    """

    answers_any_name = False

    def __init__(
        self, command: ServerCommand, process: ServerProcess, client: Client, scratch: Scratch, port: int
    ) -> None:
        from ctxflow.models.server_client import UNREACHED, Stranger, dump

        self.name = command.name
        self.models: tuple[str, ...] = ()
        self._command, self._process, self._client = command, process, client
        self._scratch, self._port = scratch, port
        self._dump, self._unreached, self._stranger = dump, UNREACHED, Stranger
        self._in_flight = self._answered = 0
        self.served = self.waiting = 0
        self.served_at = 0.0
        self._gate = _Gate()
        self._told = 0.0  # When it was last logged that requests wait.
        self._lost = ""  # Why it is of no more use.
        self._ending: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Return the number of the server's process."""
        return self._process.pid

    async def be_ready(self) -> None:
        """Wait until it is healthy, then ask for its models and watch over it.

        :raises ServerFailed: if it ended, or if somebody else listens in its place.
        """
        loop = asyncio.get_running_loop()
        began = told = loop.time()
        pause = 0.05
        while not await self._is_healthy():
            if self._process.ended.done():
                raise ServerFailed(
                    await self._process.told_end(f"{self._process.ended.result()} before it could serve")
                )
            if loop.time() - told >= _TELL_SECONDS:
                told = loop.time()
                last = self._process.last_lines()[-1:]
                said = f"; it last printed: {last[0]}" if last else ""
                print(f"[ctxflow: {self.name} has been starting for {told - began:.0f} s{said}]", flush=True)  # noqa: T201
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, 1.0)
        await self._ask_models()
        self._watch = asyncio.create_task(self._watch_over())

    async def _is_healthy(self) -> bool:
        if self._port:
            found, ours = self._process.listeners(self._port)
            if not found:
                return False
            if not ours:
                raise self._intruded()
        try:
            answer = await self._client.get(self._command.health, 10.0)
        except self._stranger:
            raise self._intruded() from None
        except self._unreached:
            return False
        if answer.status in (401, 403):
            raise self._locked_out()
        if answer.status == 404:
            raise ServerFailed(
                f"{self.name} has no {self._command.health}: give health=, the path that answers 200 once it can serve"
            )
        return answer.status == 200

    def _intruded(self) -> ServerFailed:
        return ServerFailed(
            f"port {self._port} of this machine, which was free when {self.name} was started, was taken by a process "
            "that is none of it: nothing was sent there; try again"
        )

    async def _ask_models(self) -> None:
        """Note the models that it serves; many a server tells none."""
        with contextlib.suppress(*self._unreached):
            answer = await self._client.get("/v1/models", 60.0)
            if answer.status in (401, 403):
                raise self._locked_out()
            listed = answer.json()
            if answer.status == 200 and isinstance(listed, dict) and isinstance(listed.get("data"), list):
                self.models = tuple(
                    str(each["id"]) for each in listed["data"] if isinstance(each, dict) and "id" in each
                )

    def _locked_out(self) -> ServerFailed:
        return ServerFailed(f"{self.name} does not take its key: see key=, and what its own settings say of keys")

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request, as `OpenAIEngine.answer`.

        A server that is busy (429, 503) gets as many requests at once as it took, and is asked again, which is logged
        once a minute; a connection that is lost too, while the server lives, and a request that took too long (408,
        425), three times in all.

        :raises ServerFailed: if it fails at this request again and again, and lives; or if it is busy for this one 100
            times while it answers others that were sent later, and then also while it has no other of ours; or if it
            is busy for all of them for half an hour.
        """
        data = await aside(body, lambda: self._to_send(endpoint, body))
        lost = late = tries = 0
        busy: _Busy | None = None
        self._in_flight += 1
        try:
            if self.waiting:  # Else a new one would take each place before those for which it was busy come again.
                await asyncio.sleep(_BUSY_SECONDS * random.random() * self.waiting / self._in_flight)
            while True:
                self._check_lost()
                alone = busy is not None and busy.passed_over
                await self._gate.enter(again=busy is not None, alone=alone)
                try:
                    answer = await self._client.post(endpoint, data)
                    self._gate.answered(answer.status in _BUSY, busy is not None)
                except self._unreached as error:
                    await self._look_after()
                    lost += 1
                    if lost >= 3:
                        raise ServerFailed(f"{self.name} broke off the connection: {error!r}") from error
                    continue
                except self._stranger:
                    raise await self._give_up(
                        f"does not listen at port {self._port} any more, but somebody else"
                    ) from None
                finally:
                    self._gate.leave()
                self._answered += 1
                if answer.status == 200:
                    self.served += 1
                    self.served_at = asyncio.get_running_loop().time()
                    return self._taken(answer)
                late += answer.status in _LATE
                if answer.status not in (*_LATE, *_BUSY) or late >= _LATE_TRIES:
                    raise await self._refusal(endpoint, answer)
                if answer.status in _BUSY:
                    busy = busy or _Busy(self, self._gate.there)
                    busy.check(answer, alone)
                await self._look_after(0.0)
                await asyncio.sleep(min(_BUSY_SECONDS, 0.1 * 1.5 ** min(tries, 20)))
                tries += 1
        finally:
            self._in_flight -= 1
            if busy is not None:
                self.waiting -= 1

    def tell_busy(self, answer: Answer, seconds: float) -> None:
        """Tell that requests wait for it, once a minute."""
        now = asyncio.get_running_loop().time()
        if seconds < _MINUTE or now - self._told < _MINUTE:
            return
        self._told = now
        waiting = counted(self.waiting, "request waits", "requests wait")
        print(  # noqa: T201
            f"[ctxflow: {self.name} is busy: {waiting} for it, one for {seconds:.0f} s; it answers "
            f"{answer.status}: {_sentence(answer)}]",
            flush=True,
        )

    def _to_send(self, endpoint: str, body: Mapping[str, Any]) -> bytes:
        """Return a request as it is sent, or raise why it is not."""
        if endpoint not in ENDPOINTS:
            raise ItemRefused(f"{self.name} is not asked at {short(endpoint)}: give one of {', '.join(ENDPOINTS)}")
        if body.get("stream"):
            raise ItemRefused("answers are given whole: leave stream out of the request, or make it false")
        if (wrong := hazard(endpoint, body)) is not None:
            raise ItemRefused(wrong)
        asked = body.get("model")
        if asked and self.answers_any_name and len(self.models) == 1:
            asked, body = None, {**body, "model": self.models[0]}
        if self._command.ignores_model and asked and self.models and asked not in self.models:
            raise ItemRefused(f"{self.name} serves {', '.join(self.models)}, and not the model {short(asked)}")
        try:
            return self._dump(body if "model" in body or not self.models else {"model": self.models[0], **body})
        except (TypeError, ValueError, RecursionError) as error:
            raise ItemRefused(f"the request is no JSON data ({error}): give texts, numbers, lists and dicts") from None

    def _taken(self, answer: Answer) -> dict[str, Any]:
        found = answer.json()
        if not isinstance(found, dict):
            raise ServerFailed(f"{self.name} answered what is no JSON object: {short(answer.body[:_SENTENCE])}")
        return found

    async def _refusal(self, endpoint: str, answer: Answer) -> Exception:
        """Return the error for an answer that is none."""
        said = _sentence(answer)
        if answer.status == 501 or (answer.status in (404, 405) and "model" not in said):
            return ItemRefused(f"{self.name} does not answer {endpoint} as it was started: {said}")
        # llama-server answers 500 where a request has images, and it no model that sees.
        if 400 <= answer.status < 500 or (answer.status == 500 and "not supported" in said):
            return ItemRefused(f"{self.name} refuses the request: {said}")
        await self._look_after()
        healthy = False
        with contextlib.suppress(*self._unreached, self._stranger):
            healthy = (await self._client.get(self._command.health, _BUSY_SECONDS)).status == 200
        if not healthy:
            await self._look_after(_BUSY_SECONDS)
            return await self._give_up(f"failed, and is not healthy any more: {said}")
        return ServerFailed(f"{self.name} failed at the request ({answer.status}): {said}")

    async def _look_after(self, seconds: float = _DEATH_SECONDS) -> None:
        """Watch a server that may be ending.

        :raises ContextLost: if it has ended.
        """
        if not self._process.ended.done() and not self._lost and seconds:
            await asyncio.wait([self._process.ended], timeout=seconds)
        if self._process.ended.done() and not self._lost:
            await self._give_up(self._process.ended.result())
        self._check_lost()

    def _check_lost(self) -> None:
        if self._ending is not None:
            raise ContextLost(self._lost or f"{self.name} was ended with its context")
        if self._lost:
            raise ContextLost(self._lost)

    async def _give_up(self, what: str) -> ContextLost:
        """Note that the server is of no more use, and end what is in flight."""
        doing = f" while {counted(self._in_flight, 'request')} were in flight" if self._in_flight else ""
        told = await self._process.told_end(what + doing.replace("1 request were", "1 request was"))
        if not self._lost:
            self._lost = told
            await self._client.aclose()
        return ContextLost(self._lost)

    async def _watch_over(self) -> None:
        """Notice the server's end, and that it does not answer any more."""
        pause = self._command.unresponsive_seconds / _LOOKS
        silent, answered, ran = 0.0, 0, 0.0
        while not self._lost:
            await asyncio.wait([self._process.ended], timeout=pause)
            if self._process.ended.done():
                await self._give_up(self._process.ended.result())
                return
            before, ran = ran, self._process.processor_seconds()  # Also remembers its processes.
            stopped = self._process.stopped()
            if not self._in_flight or self._answered != answered or not (stopped or not await self._answers(pause)):
                silent, answered = 0.0, self._answered
                continue
            # What computes may only have no thread left that answers.
            silent += _PART_OF_BUSY if not stopped and ran - before > _BUSY_SHARE * pause else 1.0
            if silent >= _LOOKS:
                why = "one of its processes was stopped" if stopped else f"{self._command.health} gives no answer"
                await self._give_up(f"has not answered for {self._command.unresponsive_seconds:g} s or more ({why})")

    async def _answers(self, seconds: float) -> bool:
        began = asyncio.get_running_loop().time()
        try:
            await self._client.get(self._command.health, seconds)
        except (*self._unreached, self._stranger):
            left = began + seconds - asyncio.get_running_loop().time()
            await asyncio.wait([self._process.ended], timeout=max(0.0, left))
            return False
        return True  # Whatever it says, it speaks.

    async def aclose(self) -> None:
        """End the server with all that it started, as `OpenAIEngine.aclose`: by SIGTERM, after 1.5 s by force."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._client.aclose()
        await self._process.end()
        self._scratch.close()


class _Gate:
    """How many requests a server gets at once: all that there are, until it is busy; then what it took, and a few more.

    What is over that waits here, those first for which it was busy before.

    :ivar there: how many it has.
    """

    def __init__(self) -> None:
        self.there = 0
        self._limit = math.inf
        self._is_alone = False
        self._alone: collections.deque[asyncio.Future[None]] = collections.deque()
        self._refused: collections.deque[asyncio.Future[None]] = collections.deque()
        self._new: collections.deque[asyncio.Future[None]] = collections.deque()

    async def enter(self, again: bool, alone: bool = False) -> None:
        """Wait until a request may be sent.

        :param again: whether the server was busy for it before.
        :param alone: whether the server is to have no other until it leaves.
        """
        turn = asyncio.get_running_loop().create_future()
        waiting = self._alone if alone else self._refused if again else self._new
        waiting.append(turn)
        self._wake()
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    waiting.remove(turn)
                self._wake()  # Others may have waited for it to be alone.
            else:
                self.leave()
            raise

    def answered(self, busy: bool, again: bool) -> None:
        """Note an answer; the request is still to leave."""
        if busy and not self._is_alone:
            others = self.there if again else self.there - 1  # One that comes again may be refused for itself.
            self._limit = max(1, others, self._limit / 2 if self._limit < math.inf else 0)
        elif not busy:
            self._limit += _GROWTH

    def leave(self) -> None:
        """Make room for others: a request is answered, or not any more."""
        self.there -= 1
        self._is_alone = False
        self._wake()

    def _wake(self) -> None:
        while not self._is_alone and (waiting := self._alone or self._refused or self._new):
            if self.there >= (1 if self._alone else self._limit):
                break
            turn = waiting.popleft()
            if not turn.done():
                self.there += 1
                self._is_alone = waiting is self._alone
                turn.set_result(None)


class _Busy:
    """A request for which a server is busy: since when, how often, and how many others it answered instead."""

    def __init__(self, server: OpenAIServer, there: int) -> None:
        self._server = server
        self._since = asyncio.get_running_loop().time()
        self._tries = 0
        self._others = server.served + there  # Once it has answered more, these were sent later.
        server.waiting += 1

    @property
    def passed_over(self) -> bool:
        """Whether it was refused often enough while others were answered: by chance, or for itself."""
        return self._tries >= _BUSY_TRIES and self._server.served >= self._others + _BUSY_OTHERS

    def check(self, answer: Answer, alone: bool) -> None:
        """Tell of it, or raise `ServerFailed` if it need not be waited for any more.

        :param alone: whether the server had no other request of ours.
        """
        server, now = self._server, asyncio.get_running_loop().time()
        self._tries += 1
        others = ""
        if alone and self.passed_over:
            others = "others that were sent later were answered"
        elif now - max(self._since, server.served_at) >= _ALONE_SECONDS:
            others = "no other was answered either"
        if others:
            raise ServerFailed(
                f"{server.name} answered this request {answer.status} for {now - self._since:.0f} s, and {others}: "
                f"{_sentence(answer)}"
            )
        server.tell_busy(answer, now - self._since)


def _sentence(answer: Answer) -> str:
    """Return what a server says of a request that it does not answer."""
    found: Any = answer.json()
    for name in ("error", "message", "detail"):
        while isinstance(found, dict) and name in found:
            found = found[name]
            if isinstance(found, dict) and "message" in found:
                found = found["message"]
    text = found if isinstance(found, str) else answer.body.decode(errors="replace") if found is None else str(found)
    return " ".join(text.split())[:_SENTENCE] or f"status {answer.status}"
