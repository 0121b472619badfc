"""Check whether workers of a site can start and reach this machine: their environment, the network, and a probe job.

The job itself: host/program_main.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import itertools
import json
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxflow.environments.opening import UnusableEnvironment, read_manifest
from ctxflow.errors import counted
from ctxflow.factory.provider import JobChange, Provider, ProviderError, explaining_line
from ctxflow.factory.run_files import job_of, python_of
from ctxflow.factory.tier_providers import provider_of
from ctxflow.files import write_private
from ctxflow.host import program_main
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

_PYTHON_SECONDS = 30
_VERSION = "import json, sys; print(json.dumps(sys.version_info[:2]))"


@dataclass(frozen=True)
class EnvironmentAnswer:
    """Whether the workers' environment is found: what is there, what is wrong, and what to look after, in sentences."""

    found: str
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def ask_environment(site: Site) -> EnvironmentAnswer:
    """Look for the workers' environment from here, and compare its Python with this one.

    >>> ask_environment(Site(engine="taskvine")).problems
    ()
    """
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    images = [tier.image for tier in site.tiers if tier.image]
    if site.python_environment is None:
        where = "the workers' images" if images else "the workers' PATH"
        return EnvironmentAnswer(
            f"python3 of {where}, which cannot be seen from here",
            advice=(f"see that python3 and vine_worker are on {where}, and that it is Python {mine} like this one",),
        )
    if os.path.isfile(site.python_environment):
        return _archive(site.python_environment, mine)
    python = python_of(site.python_environment)
    if not os.path.exists(python):
        missing = f"python_environment {site.python_environment} is not on this machine"
        if images:
            return EnvironmentAnswer(f"{missing}; the images must have it")
        problem = f"{missing}: write a folder that this machine and those of the workers see, or `ctxflow env pack` it"
        return EnvironmentAnswer(missing, (problem,))
    return _folder(site.python_environment, python, mine)


def _archive(path: str, mine: str) -> EnvironmentAnswer:
    try:
        manifest = read_manifest(path)
    except (UnusableEnvironment, OSError) as error:
        return EnvironmentAnswer(f"{path} cannot be used", (str(error),))
    size, theirs = f"{manifest['bytes'] / 1e6:,.0f} MB unpacked", str(manifest["python"])
    found = f"{path}: Python {theirs} for {manifest['platform']}, {size}"
    return EnvironmentAnswer(found, _versions(".".join(theirs.split(".")[:2]), mine))


def _folder(folder: str, python: str, mine: str) -> EnvironmentAnswer:
    unseen = "whether the workers' machines see it cannot be told from here"
    try:
        command = [python, "-c", _VERSION]
        told = subprocess.check_output(command, stderr=subprocess.PIPE, timeout=_PYTHON_SECONDS)
        theirs = ".".join(map(str, json.loads(told)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        problem = f"{python} does not start here ({error}): make the environment again"
        return EnvironmentAnswer(f"{folder}, whose Python does not start", (problem,))
    return EnvironmentAnswer(f"{folder}: Python {theirs}; {unseen}", _versions(theirs, mine))


def _versions(theirs: str, mine: str) -> tuple[str, ...]:
    instead = f"run the program with Python {theirs}, or make the environment with Python {mine}"
    return () if theirs == mine else (f"the environment has Python {theirs} and this is Python {mine}: {instead}",)


def network_problems(site: Site) -> Iterator[str]:
    """Yield why no worker would reach a run of this site that is started here, a sentence each.

    >>> list(network_problems(Site(engine="taskvine", taskvine={"address": "no-such-host.invalid"})))[0][:46]
    'address no-such-host.invalid cannot be resolve'
    """
    own = site.taskvine.address
    if own:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(own, None)}
        except OSError as error:
            instead = "write an IP address of this machine, or a name that the workers' machines know"
            yield f"address {own} cannot be resolved ({error.strerror or error}): {instead}"
            found = set()
        elsewhere = [tier.name for tier in site.tiers if tier.provider != "local"]
        if elsewhere and found and all(address.startswith("127.") or address == "::1" for address in found):
            alone = f"address {own} is this machine to itself alone, and tier {elsewhere[0]} is on others"
            yield f"{alone}: write the address by which they reach it"
    if refused := port_problem(site.taskvine.ports):
        yield refused


def port_problem(ports: Sequence[int]) -> str:
    """Return why no run can listen at any of these ports now, in a sentence; "" if one can."""
    first = ""
    for port in ports:
        if not (refused := _refusal(port)):
            return ""
        first = first or refused
    where = f"no port of [{min(ports)}, {max(ports)}] will do: " if len(ports) > 1 else ""
    return f"{where}{first}"


def _refusal(port: int) -> str:
    """Return why nobody can listen at a port here, "" if it can be done."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except PermissionError:
            return f"port = {port} is for root alone on this machine: write one from 1024 on, or 0 for any"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port = {port} is taken on this machine: write another, or 0 for any, or end who listens there"
            return f"port = {port} cannot be listened at ({error.strerror}): write another, or 0 for any"
    return ""


def network_advice(site: Site) -> Iterator[str]:
    """Yield what may keep workers from a run of this site that is started here, a sentence each."""
    own = site.taskvine.address
    if own and not _is_ours(own):
        yield f"address {own} is none of this machine's: workers reach a run only if what goes there comes here"
    for tier in site.tiers:
        if tier.provider in ("condor", "local"):  # Whose jobs need no directory that machines share.
            continue
        here = os.getcwd()
        if file_system(here) in ("tmpfs", "ramfs", "overlay") or here.startswith(("/tmp/", "/var/tmp/", "/dev/shm/")):
            yield (
                f"{here} is seldom seen by other machines, and jobs of tier {tier.name} find their files where the run "
                "is started: start it in a directory that all nodes share"
            )
        if tier.disk_gb is not None:
            yield (
                f"disk_gb = {tier.disk_gb:g} of tier {tier.name} is asked of nobody: a worker that finds less in "
                "TMPDIR or /tmp does not start; leave it out where nodes may have less"
            )


def _is_ours(address: str) -> bool:
    for family, kind, number, _, place in _resolved(address):
        with socket.socket(family, kind, number) as trial:
            try:
                trial.bind((place[0], 0))
            except OSError:
                continue
            return True
    return not _resolved(address)  # What cannot be resolved is reported already.


def _resolved(address: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []


def file_system(path: str) -> str:
    """Return the kind of file system of a directory, such as "nfs4"; "" if that cannot be told.

    >>> file_system("/proc")
    'proc'
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    path = os.path.realpath(path)
    around = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(around, key=lambda each: len(each[0]))[1] if around else ""


def own_address() -> str:
    """Return the address that this machine uses for outgoing connections; nothing is sent to find it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


SECONDS = 60.0
_LOOK_SECONDS = 0.2
_MOST_BYTES = 4096
_SAY_SECONDS = 5.0  # How long a connection may take to send what it found.
_MOST_LINES = 100
SECOND_SECONDS = 20.0
"""How long a second probe may take by default to connect after the first."""


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
    site: Site,
    tiers: Sequence[Tier],
    limit: float = SECONDS,
    provider: Callable[[Tier, str], Provider] = provider_of,
    second: float = SECOND_SECONDS,
) -> list[ProbeAnswer]:
    """Start a job of each tier at the same time, where runs would be started now, and return what each reported.

    :param limit: seconds that a job may take to begin and to connect; `second`, that a second one of a tier may take
        to connect after the first.
    """
    answers: dict[str, ProbeAnswer] = {}

    def work(tier: Tier) -> None:
        try:
            answers[tier.name] = _probe(site, tier, limit, provider, second)
        except (ProviderError, OSError) as error:
            answers[tier.name] = ProbeAnswer(tier.name, problems=(f"no probe can be started: {error}",))

    threads = [threading.Thread(target=work, args=(tier,), daemon=True) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[tier.name] for tier in tiers]


def _probe(
    site: Site, tier: Tier, limit: float, provider: Callable[[Tier, str], Provider], second: float
) -> ProbeAnswer:
    run = secrets.token_hex(6)
    folder = os.path.abspath(f"ctxflow-probe-{run}")  # Where a run would keep its files: machines may have to see it.
    key = secrets.token_hex(32)
    lends = provider(tier, run)
    with contextlib.ExitStack() as last:
        os.makedirs(folder, mode=0o700)
        last.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = last.enter_context(_listening(site))
        connections = last.enter_context(_Connections(listener, key.encode()))
        secret = os.path.join(folder, "secret")
        write_private(secret, key)
        program = shutil.copy(program_main.__file__, folder)
        lends.start(folder)
        last.callback(lends.stop)
        python = python_of(site.python_environment)
        port = str(listener.getsockname()[1])
        words = [python, "program_main.py", "probe", site.taskvine.address or own_address(), port, "secret"]
        two = site.taskvine.worker_transfers and tier.workers > 1 and tier.provider != "local"
        words += (
            [tier.cache or "", site.taskvine.transfer_ports or "0:0"] if two else [tier.cache] if tier.cache else []
        )
        job = job_of(tier, words, [program, secret])
        begun = time.monotonic()
        names = lends.submit(job, 2 if two else 1)
        news: list[JobChange] = []
        while time.monotonic() < begun + limit:
            facts = connections.listen(_LOOK_SECONDS, two)
            if facts is not None:
                answer = _judged(tier, facts, time.monotonic() - begun)
                return _with_peer(answer, connections, second) if two else answer
            news += lends.changes()
            if {change.job for change in news if change.state == "ended"}.issuperset(names):
                # It may have connected a moment before it ended.
                facts = connections.listen(_LOOK_SECONDS)
                return _judged(tier, facts, time.monotonic() - begun) if facts else _ended(tier, lends, news)
        return _late(tier, lends, news, limit)
    raise AssertionError  # Nothing above lets an exception end silently.


def _with_peer(answer: ProbeAnswer, connections: _Connections, seconds: float) -> ProbeAnswer:
    """Add whether a second probe, which may take so long to connect, and the first reach each other."""
    until = time.monotonic() + seconds
    while len(connections.held) < 2 and time.monotonic() < until:
        connections.listen(_LOOK_SECONDS, True)
    unknown = "so it is not known whether workers reach each other"
    held = connections.held
    if len(held) < 2:
        advice = f"a second probe did not connect within {seconds:g} s, {unknown}"
    elif held[0].host == held[1].host:
        advice = f"both probes were on {held[0].host}, {unknown}"
    else:
        pairs = itertools.permutations(held[:2], 2)
        troubles = [f"{a.host} cannot reach {b.host}: {why}" for a, b in pairs if (why := a.tries(b))]
        if not troubles:
            return dataclasses.replace(answer, found=f"{answer.found}; it and one on {held[1].host} reach each other")
        advice = (
            f"workers do not reach each other, so that each gets its files from this machine ({'; '.join(troubles)}): "
            "have transfer_port name ports that are open between them, or write worker_transfers = false"
        )
    return dataclasses.replace(answer, advice=(*answer.advice, advice))


def _proof(key: bytes, said: bytes) -> bytes:
    """Return what shows that something is said by a probe, or to one, of whom only we know the key."""
    return hmac.new(key, said, hashlib.sha256).hexdigest().encode()


class _HeldProbe:
    """A probe that waits to be told whom to try."""

    def __init__(self, line: socket.socket, facts: Mapping[str, Any], key: bytes) -> None:
        self._line, self._facts, self._key = line, facts, key
        self.host = str(facts["host"])

    def tries(self, other: _HeldProbe) -> str:
        """Have it connect to another; return why it cannot, "" if it can."""
        if not other._facts.get("listens"):
            return "there is no port to listen at"
        try:
            said = f"{other._line.getpeername()[0]} {other._facts['listens']}".encode()
            self._line.settimeout(_SAY_SECONDS + _LOOK_SECONDS)
            self._line.sendall(_proof(self._key, said) + b" " + said + b"\n")
            return str(json.loads(self._line.recv(_MOST_BYTES))["trouble"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"it does not answer ({error})"

    def close(self) -> None:
        """Have it end."""
        self._line.close()


def _listening(site: Site) -> socket.socket:
    """Return a socket that listens where a run of this site would."""
    failure = OSError("there is no port to listen at")
    for port in site.taskvine.ports:
        try:
            return socket.create_server(("", port))
        except OSError as error:
            failure = error
    raise failure


class _Connections:
    """Read from all who connect at the same time, so that one without the key does not block a probe."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._lines: dict[socket.socket, tuple[float, bytes]] = {}  # Its deadline, and what it has sent.
        self.held: list[_HeldProbe] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for line in list(self._lines):
            self._end(line)
        for probe in self.held:
            probe.close()
        self._selector.close()

    def listen(self, seconds: float, hold: bool = False) -> Mapping[str, Any] | None:
        """Return what a probe reports within so many seconds, None if none does.

        :param hold: whether it is to wait, among `held`.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._accept()
                elif (found := self._read(key.fileobj, hold)) is not None:  # type: ignore[arg-type]
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

    def _read(self, line: socket.socket, hold: bool) -> Mapping[str, Any] | None:
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
        if hmac.compare_digest(proof, _proof(self._key, facts)):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(facts)
                if not hold:
                    line.sendall(b".")
        if found is not None and hold:
            del self._lines[line]
            self._selector.unregister(line)
            self.held.append(_HeldProbe(line, found, self._key))
        else:
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
    has = f"Python {facts['python']}, {free:.0f} GB free in {facts['place']}"
    if cache := facts.get("cache"):
        there = f"{counted(cache['entries'], 'entry', 'entries')}, {cache['bytes'] / 1e9:.1f} GB"
        has += f"; its cache {cache['path']} has {there}, and its disk {cache['free'] / 1e9:.0f} GB free"
        if cache["problem"]:
            instead = "write another folder as cache, or remove this one if nobody needs what is in it"
            problems.append(f"the cache {cache['path']} on {where} {cache['problem']}: {instead}")
    found = f"a probe on {where} connected to this machine after {seconds:.1f} s: {has}"
    return ProbeAnswer(tier.name, found, tuple(problems))


def _ended(tier: Tier, lends: Provider, news: Sequence[JobChange]) -> ProbeAnswer:
    job = next(change.job for change in news if change.state == "ended")
    host = next((change.host for change in news if change.job == job and change.host), None)
    time.sleep(_LOOK_SECONDS)  # What it wrote may still be on its way.
    words = explaining_line(lends.last_words(job))
    where = f" on {host}" if host else ""
    return ProbeAnswer(tier.name, problems=(f"a probe{where} ended and did not connect: {words}",))


def _late(tier: Tier, lends: Provider, news: Sequence[JobChange], limit: float) -> ProbeAnswer:
    state = next((change for change in reversed(news) if change.state != "ended"), None)
    if state is not None and state.state == "running":
        where, words = state.host or "its machine", explaining_line(lends.last_words(state.job))
        return ProbeAnswer(tier.name, problems=(f"a probe runs on {where} and does not connect: {words}",))
    why = f" ({state.reason})" if state is not None and state.reason else ""
    unknown = "so that nobody knows whether workers reach this machine"
    return ProbeAnswer(tier.name, advice=(f"a probe did not begin within {limit:.0f} s{why}, {unknown}",))
