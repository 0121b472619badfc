"""Try each tier with one job that connects back as a worker would, for `ctxflow site check --live`.

The job itself: host/probe.py; what can be told without one: site_check.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxflow.factory.provider import JobChange, Provider, ProviderError, explaining_line
from ctxflow.factory.site_check import own_address
from ctxflow.factory.tier_providers import job_of, provider_of, python_of
from ctxflow.host import probe
from ctxflow.safe_files import write_private
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

SECONDS = 60.0
_LOOK_SECONDS = 0.2
_MOST_BYTES = 4096
_SAY_SECONDS = 5.0  # How long one that connects may take to say what it found.
_MOST_LINES = 100


@dataclass(frozen=True)
class ProbeAnswer:
    """The result of a tier's probe.

    :ivar found: a sentence; "" if it did not connect.
    :ivar problems: why no worker of the tier would be of use; `advice`, what could not be shown.
    """

    tier: str
    found: str = ""
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def probe_tiers(
    site: Site, tiers: Sequence[Tier], limit: float = SECONDS, provider: Callable[[Tier, str], Provider] = provider_of
) -> list[ProbeAnswer]:
    """Start a job of each tier at the same time, where runs would be started now, and return what each reported.

    :param limit: seconds that a job may take to begin and to connect.
    """
    answers: dict[str, ProbeAnswer] = {}

    def work(tier: Tier) -> None:
        try:
            answers[tier.name] = _probe(site, tier, limit, provider)
        except (ProviderError, OSError) as error:
            answers[tier.name] = ProbeAnswer(tier.name, problems=(f"no probe can be started: {error}",))

    threads = [threading.Thread(target=work, args=(tier,), daemon=True) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[tier.name] for tier in tiers]


def _probe(site: Site, tier: Tier, limit: float, provider: Callable[[Tier, str], Provider]) -> ProbeAnswer:
    run = secrets.token_hex(6)
    folder = os.path.abspath(f"ctxflow-probe-{run}")  # Where a run would keep its files: machines may have to see it.
    key = secrets.token_hex(32)
    lends = provider(tier, run)
    with contextlib.ExitStack() as last:
        os.makedirs(folder, mode=0o700)
        last.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = last.enter_context(_listening(site))
        ear = last.enter_context(_Ear(listener, key.encode()))
        secret = os.path.join(folder, "secret")
        write_private(secret, key)
        program = shutil.copy(probe.__file__, folder)
        lends.start(folder)
        last.callback(lends.stop)
        python = python_of(site.python_environment)
        words = [python, "probe.py", site.taskvine.address or own_address(), str(listener.getsockname()[1]), "secret"]
        job = job_of(tier, words, [program, secret])
        begun = time.monotonic()
        [name] = lends.submit(job, 1)
        news: list[JobChange] = []
        while time.monotonic() < begun + limit:
            facts = ear.listen(_LOOK_SECONDS)
            if facts is not None:
                return _judged(tier, facts, time.monotonic() - begun)
            news += lends.changes()
            if any(change.state == "ended" for change in news):
                # It may have connected a moment before it ended.
                facts = ear.listen(_LOOK_SECONDS)
                return _judged(tier, facts, time.monotonic() - begun) if facts else _ended(tier, name, lends, news)
        return _late(tier, name, lends, news, limit)
    raise AssertionError  # Nothing above lets an exception end silently.


def _listening(site: Site) -> socket.socket:
    """Return a socket that listens where a run of this site would."""
    trouble: OSError | None = None
    for port in site.taskvine.ports:
        try:
            return socket.create_server(("", port))
        except OSError as error:
            trouble = error
    raise trouble or OSError("there is no port to listen at")


class _Ear:
    """Hears all who connect at the same time: who has not the key keeps no probe waiting, whatever it says and when."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._lines: dict[socket.socket, tuple[float, bytes]] = {}  # Until when it may speak, and what it has said.
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Ear:
        return self

    def __exit__(self, *_: object) -> None:
        for line in list(self._lines):
            self._end(line)
        self._selector.close()

    def listen(self, seconds: float) -> Mapping[str, Any] | None:
        """Return what a probe says within so many seconds; None if none has said it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._accept()
                elif (found := self._hear(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return found
        for line in [line for line, (by, _) in self._lines.items() if by <= until]:
            self._end(line)
        return None

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:
            return
        line.setblocking(False)
        self._lines[line] = time.monotonic() + _SAY_SECONDS, b""
        self._selector.register(line, selectors.EVENT_READ)
        if len(self._lines) > _MOST_LINES:
            self._end(next(iter(self._lines)))

    def _hear(self, line: socket.socket) -> Mapping[str, Any] | None:
        if line not in self._lines:  # An earlier one of this round has ended it.
            return None
        by, told = self._lines[line]
        try:
            more = line.recv(_MOST_BYTES)
        except OSError:
            more = b""
        told += more
        self._lines[line] = by, told
        if more and not told.endswith(b"\n") and len(told) < _MOST_BYTES:
            return None
        proof, _, facts = told.rstrip(b"\n").partition(b" ")
        found = None
        if hmac.compare_digest(proof, hmac.new(self._key, facts, hashlib.sha256).hexdigest().encode()):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(facts)
                line.sendall(b".")
        self._end(line)
        return found

    def _end(self, line: socket.socket) -> None:
        del self._lines[line]
        self._selector.unregister(line)
        line.close()


def _judged(tier: Tier, facts: Mapping[str, Any], seconds: float) -> ProbeAnswer:
    where, free = facts["host"], facts["free"] / 1e9
    problems = []
    if not facts["vine_worker"]:
        problems.append(
            f"vine_worker is not on the PATH of {where}: install coop-computing-tools (Debian) or ndcctools "
            "(conda-forge) there, or write an environment that has it"
        )
    if tier.disk_gb is not None and tier.disk_gb > free:
        problems.append(
            f"{facts['place']} on {where} has {free:.1f} GB free, and disk_gb promises {tier.disk_gb:g}: write less, "
            "or have TMPDIR name a larger disk"
        )
    found = (
        f"a probe on {where} connected to this machine after {seconds:.1f} s: Python {facts['python']}, "
        f"{free:.0f} GB free in {facts['place']}"
    )
    return ProbeAnswer(tier.name, found, tuple(problems))


def _ended(tier: Tier, job: str, lends: Provider, news: Sequence[JobChange]) -> ProbeAnswer:
    host = next((change.host for change in reversed(news) if change.host), None)
    time.sleep(_LOOK_SECONDS)  # What it wrote may still be on its way.
    words = explaining_line(lends.last_words(job))
    return ProbeAnswer(
        tier.name, problems=(f"a probe{f' on {host}' if host else ''} ended and did not connect: {words}",)
    )


def _late(tier: Tier, job: str, lends: Provider, news: Sequence[JobChange], limit: float) -> ProbeAnswer:
    state = next((change for change in reversed(news) if change.state != "ended"), None)
    if state is not None and state.state == "running":
        words = explaining_line(lends.last_words(job))
        return ProbeAnswer(
            tier.name, problems=(f"a probe runs on {state.host or 'its machine'} and does not connect: {words}",)
        )
    why = f" ({state.reason})" if state is not None and state.reason else ""
    unknown = "so that nobody knows whether workers reach this machine"
    return ProbeAnswer(tier.name, advice=(f"a probe did not begin within {limit:.0f} s{why}, {unknown}",))
