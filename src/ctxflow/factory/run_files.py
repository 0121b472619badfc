"""The files by which live runs and factories are found, and what a worker must know to join a run.

ID.json is a run's connection file, which says where its manager listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctxflow.errors import CtxflowError
from ctxflow.factory.provider import WorkerJob
from ctxflow.files import NotOwnError, make_own_folder, open_own, own_folder, read_own, tell_once, write_private
from ctxflow.ownership import birth_of, lives
from ctxflow.sites.site_model import Tier

# How long a driver in another PID namespace may write no status, as on a disk that stalls, and still count as alive.
_UNSEEN_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A live run, as published in its connection file.

    :ivar host: the machine that its driver runs on; `pid`, of the driver; `directory`, where it keeps its files.
    :ivar address: where its manager listens, with `port`.
    :ivar password_file: holds the key to the run; only its user can read it.
    :ivar program: the workers' program, one file, and `python`, what starts it on workers.
    :ivar commands: tier -> the command that starts a worker of it by hand, on any machine that reaches the address and
        sees the files that the command names.
    :ivar variables: tier -> the names of the variables that its workers find in their environment.
    :ivar acquire: who acquires its workers: "run" or "factory", as the site says.
    :ivar born: when its driver began, which distinguishes it from another process with its number; "" if unknown.
    :ivar transfer_ports: where its workers serve one another, "" for any port.
    """

    id: str
    host: str
    pid: int
    directory: str
    address: str
    port: int
    password_file: str
    program: str
    commands: dict[str, list[str]]
    variables: dict[str, list[str]]
    python: str = "python3"
    ssl: bool = False
    acquire: str = "run"
    born: str = ""
    transfer_ports: str = ""

    @classmethod
    def read(cls, text: bytes) -> PublishedRun:
        """Read a connection file, without keys of other versions; a ValueError or TypeError says that it has no run."""
        told = json.loads(text)
        if not isinstance(told, dict) or not isinstance(told.get("pid"), int):
            raise ValueError("it tells of no run")
        return cls(**{name: value for name, value in told.items() if name in _FIELDS})

    @property
    def lead(self) -> Lead:
        """What its workers must know to join."""
        where = (self.address, self.port, self.program, self.password_file)
        return Lead(*where, self.python, self.ssl, self.transfer_ports)


_FIELDS = {field.name for field in dataclasses.fields(PublishedRun)}


def runs_directory() -> str:
    """Return where connection files are kept: in the user's run-time directory if there is one, else in their home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "ctxflow") if base and os.path.isdir(base) else _runs_at_home()


def _runs_at_home() -> str:
    return os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")


def all_directories() -> list[str]:
    """Return where connection files may be: a driver that is a job itself has no run-time directory of the login's."""
    return list(dict.fromkeys([runs_directory(), _runs_at_home()]))


def live_runs() -> list[PublishedRun]:
    """Return the user's live runs on this machine, the youngest first."""
    here = socket.gethostname()
    found = [each for directory in all_directories() for each in runs_in(directory)]
    # A home may be shared with other machines; and a driver that was killed left its file behind.
    live = [(run, written) for run, written in found if run.host == here and _goes_on(run)]
    return [run for run, _ in sorted(live, key=lambda each: each[1], reverse=True)]


def is_over(run: PublishedRun) -> bool:
    """Return whether a run has ended: its file is gone, or its driver. Not so if that cannot be seen."""
    return _is_withdrawn(run) or not _goes_on(run)


def may_discard(run: PublishedRun) -> bool:
    """Return whether a run's files may be removed: it has ended, and that is more than a guess."""
    return _is_withdrawn(run) or lives(run.pid, run.born) is False


def _is_withdrawn(run: PublishedRun) -> bool:
    return not any(map(_may_be_there, _files_of(run)))


def _goes_on(run: PublishedRun) -> bool:
    """Return whether a run's driver lives; of one that cannot be seen, whether it has written its status lately."""
    alive = lives(run.pid, run.born)
    if alive is not None:
        return alive
    written = [0.0]
    for path in (*_files_of(run), os.path.join(run.directory, "status.json")):
        with contextlib.suppress(OSError):
            written.append(os.stat(path).st_mtime)
    return time.time() - max(written) < _UNSEEN_SECONDS


def _files_of(run: PublishedRun) -> list[str]:
    return [os.path.join(directory, f"{run.id}.json") for directory in all_directories()]


def _may_be_there(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:  # Any other is of a file server that does not answer.
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def runs_in(directory: str) -> Iterator[tuple[PublishedRun, int]]:
    """Yield the runs of a folder's connection files, with when each was written; only this user's own count."""
    if not own_folder(directory):
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    yield PublishedRun.read(read_own(path)), os.stat(path).st_mtime_ns


class Connection:
    """The connection file of a run, for as long as it lives; a home that cannot be written has none."""

    def __init__(self, run: PublishedRun) -> None:
        directory = runs_directory()
        self._path = os.path.join(directory, f"{run.id}.json")
        try:
            make_own_folder(directory)
            write_private(self._path, json.dumps(dataclasses.asdict(run)))
        except NotOwnError as error:
            tell_once(error)
        except OSError:
            pass

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


_LOCK_SECONDS = 1.0  # How long a factory that is just ending may still hold its lock.


def factory_file(site: str) -> str:
    """Return the file that a site's factory locks while it serves; homes may be shared with other machines."""
    name = urllib.parse.quote(f"{site}@{socket.gethostname()}", safe="@")
    return os.path.join(runs_directory(), f"factory-{name}.lock")


def factory_pid(site: str) -> int | None:
    """Return the process of the factory that serves a site for this user on this machine, None if there is none."""
    if own_folder(runs_directory()):
        with contextlib.suppress(OSError, ValueError):
            pid, _, born = read_own(factory_file(site)).decode().partition(" ")
            alive = lives(int(pid), born)
            if alive or (alive is None and _is_locked(factory_file(site))):
                return int(pid)
    return None


def _is_locked(path: str) -> bool:
    with open(open_own(path, os.O_RDWR)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def factory_mark() -> str:
    """Return what a factory writes into its lock file: its process."""
    return f"{os.getpid()} {birth_of(os.getpid()) or ''}"


@contextlib.contextmanager
def only_factory(site: str) -> Iterator[None]:
    """Hold the lock of a site's factory on this machine, for this user.

    :raises CtxflowError: if there is one.
    """
    path = factory_file(site)
    try:
        make_own_folder(runs_directory())
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CtxflowError(f"no factory can be started here: {error}") from None
    with open(descriptor, "r+") as file:
        deadline = time.monotonic() + _LOCK_SECONDS  # One that is just ending may have it still.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    who = factory_pid(site)
                    raise CtxflowError(
                        f'a factory serves the site "{site}" already, process {who}: end it first, or send it SIGHUP to'
                        " have it read the site file again"
                    ) from None
                time.sleep(0.05)
        file.truncate()
        file.write(factory_mark())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # The file stays: whoever waits for it must not lock one that is gone.


@dataclass(frozen=True)
class Lead:
    """What a worker must know to join a run: where its manager listens, and what starts the workers' program there.

    :param program: a path on this machine, as is the password's file.
    :param transfer_ports: where it serves other workers: a port, or LOW:HIGH; "" for any.
    """

    address: str
    port: int
    program: str
    password_file: str
    python: str = "python3"
    ssl: bool = False
    transfer_ports: str = ""


def python_of(environment: str | None) -> str:
    """Return what starts a worker where a site names this environment; an archive is unpacked only later.

    >>> python_of("/shared/envs/ctxflow"), python_of(None)
    ('/shared/envs/ctxflow/bin/python', 'python3')
    """
    if environment is None or environment.endswith((".tar.gz", ".tgz")):
        return "python3"
    return os.path.join(environment, "bin", "python")


def worker_command(tier: Tier, lead: Lead) -> list[str]:
    """Return the command of a worker; program and password have the paths of the lead.

    >>> print(*worker_command(Tier(name="a10", disk_gb=9), Lead("n1", 9123, "ctxflow.pyz", "password")))
    python3 ctxflow.pyz worker n1:9123 --password password --tier a10 --cores 2 --memory 10000 --disk 9000 --gpus 0
    >>> print(*worker_command(Tier(cache="/scratch/c", cache_gb=9), Lead("n1", 9123, "p.pyz", "password"))[-6:])
    --cache /scratch/c --cache-gb 9 --gpus 0
    >>> print(*worker_command(Tier(), Lead("n1", 9123, "p.pyz", "password", transfer_ports="9200:9210"))[-4:])
    --transfer-port 9200:9210 --gpus 0
    """
    words = [lead.python, lead.program, "worker", f"{lead.address}:{lead.port}", "--password", lead.password_file]
    words += ["--tier", tier.name, "--cores", str(tier.cores), "--memory", str(tier.memory // 10**6)]
    words += [] if tier.disk is None else ["--disk", str(tier.disk // 10**6)]
    if tier.cache is not None:
        words += ["--cache", tier.cache, "--cache-gb", f"{tier.cache_gb:g}"]
    words += ["--transfer-port", lead.transfer_ports] if lead.transfer_ports else []
    words += ["--gpus", "0"]  # TaskVine need not deal out GPUs: the batch system has, and one host uses them all.
    return [*words, "--ssl"] if lead.ssl else words


def worker_job(tier: Tier, lead: Lead) -> WorkerJob:
    """Return the job of one worker; program and password travel with it.

    >>> worker_job(Tier(name="a10"), Lead("10.0.0.1", 9123, "/run/ctxflow.pyz", "/run/password")).command[:2]
    ['python3', 'ctxflow.pyz']
    """
    program, password = os.path.basename(lead.program), os.path.basename(lead.password_file)
    there = dataclasses.replace(lead, program=program, password_file=password)
    words = [*worker_command(tier, there), "--remove-password"]
    return job_of(tier, words, [lead.program, lead.password_file])


def job_of(tier: Tier, words: Sequence[str], files: Sequence[str]) -> WorkerJob:
    """Return a job with a tier's size and options that runs a command, with these files beside it."""
    return WorkerJob(
        tier.name,
        words,
        files=files,
        environment=tier.env,
        cores=tier.cores,
        memory=tier.memory,
        disk=tier.disk or 0,
        gpus=tier.gpus,
        options=tier.wishes,
    )
