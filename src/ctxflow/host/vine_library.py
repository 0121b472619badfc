"""The context host of a TaskVine worker: its one library, to which every TaskVine call goes.

A call's command is one token: `=` and its instructions (frames of wire.py, with a seal) in base64, or `@`, and then
they are the content of the file `call` in its sandbox. Its answer is the reports, sealed, in base64. Instructions are
the messages of `messages.ToWorker`, reports those of `FromWorker`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import functools
import os
import platform
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ctxflow.host import vine_calls, vine_protocol, worker_program
from ctxflow.host.artifact_keys import digest_of, machine_facts
from ctxflow.host.artifacts import WORKER_BYTES, ArtifactStore
from ctxflow.host.call_surroundings import complete
from ctxflow.host.context_host import Host
from ctxflow.host.library_messages import (
    BuildContext,
    BuildFailed,
    ForgetParts,
    GivePart,
    ParkContext,
    RunCall,
    WakeContext,
)
from ctxflow.host.library_start import interpreter
from ctxflow.host.linux import (
    adopt_orphans,
    is_stopped,
    kill_children,
    listening_ports,
    machine_memory,
    on_signal,
    readable,
    transfer_server,
)
from ctxflow.host.local_files import cached
from ctxflow.host.messages import (
    TO_WORKER,
    AskFacts,
    DrainCalls,
    EndLibrary,
    FileMessage,
    FromWorker,
    InterruptCall,
    LeaveWorker,
    Listen,
    ModulesLacking,
    NoticeGiven,
    Ping,
    PreloadModules,
    StageFiles,
    ToWorker,
    WorkerFacts,
    WorkerStuck,
)
from ctxflow.host.vine_calls import FilePlaces, OpenCall, OpenCalls
from ctxflow.host.vine_protocol import SEAL_BYTES, LibraryPipes, Once, Request, key_of, open_call, parse, seal_answer
from ctxflow.host.wire import Trouble, unframe
from ctxflow.installing import __version__
from ctxflow.topology import to_graph
from ctxflow.topology.machine import cuda_devices, machine_of, order_devices

if TYPE_CHECKING:
    from ctxflow.host.host_cache import HostCache

_RELEASE_SECONDS = 1.0  # How long the answer to a release may take to be read.
_LOOK_SECONDS = 5.0
_STOPPED_LOOKS = 3
_FAREWELL_SECONDS = 5.0  # How long the vine_worker may take to end.
_ENDS_AT_ONCE = (
    EndLibrary,
    PreloadModules,
    ParkContext,
    WakeContext,
    InterruptCall,
    GivePart,
    ForgetParts,
    DrainCalls,
    Ping,
)


def main(argv: Sequence[str]) -> int:
    """Serve until the worker is released or gone."""
    parser = argparse.ArgumentParser("vine_library", description="The context host, as a library of TaskVine.")
    parser.add_argument("--log-directory", metavar="DIR", help="where the output of library processes is kept")
    parsed, worker = parse(parser, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _restore_devices()
    directory = os.environ.get("CTXFLOW_WORKER_DIRECTORY") or os.path.join(os.getcwd(), "ctxflow")
    library = VineLibrary(worker, directory, parsed.log_directory or os.path.join(directory, "logs"))
    adopt_orphans()
    library.serve()
    kill_children()
    return 0


class VineLibrary:
    """The host behind the pipes of a vine_worker.

    :param directory: where it keeps its files, on the disk of the vine_worker's sandboxes, for hard links.
    :param logs: where the library processes' output is kept.
    """

    def __init__(self, worker: LibraryPipes, directory: str, logs: str) -> None:
        self._worker = worker
        self._selector = selectors.DefaultSelector()
        self._cache = os.path.join(directory, "ctxflow-cache")
        self._states = vine_calls.states_folder(self._cache)
        with contextlib.suppress(OSError):  # What cannot be written fails later, as a report.
            os.makedirs(logs, exist_ok=True)
        self._calls = OpenCalls(self._carry_out, self._answer)
        self._host = Host(self._calls.report, self._selector, os.path.join(directory, "contexts"), logs)
        self._released = float("inf")  # When the worker ends, whether its last answer has been read or not.
        self._worker_ended = False
        self._look_at = 0.0
        self._stopped = 0  # Looks in a row at which the wrapper was stopped.
        self._directory = directory
        self._name = os.environ.get("CTXFLOW_WORKER_NAME", "")
        self._key = bytes.fromhex(os.environ.pop("CTXFLOW_KEY", "")) or key_of(b"")
        self._once = Once()
        self._kept: HostCache | None = None
        self._artifacts: ArtifactStore | None = None

    # --- the loop

    def serve(self) -> None:
        """Answer calls until the worker is released or gone."""
        selector, worker, host = self._selector, self._worker, self._host
        death = os.pidfd_open(worker.given.worker)
        if vine_protocol.host_died(
            self._directory
        ):  # TaskVine starts another in its place, which has none of its calls.
            self._leave(death)
            return
        selector.register(death, selectors.EVENT_READ, self._lost)
        selector.register(worker, selectors.EVENT_READ, self._heard)
        on_signal(signal.SIGCHLD, selector, host.bury_orphans)
        on_signal(signal.SIGTERM, selector, self._noticed)
        self._hang_bell()
        with contextlib.suppress(OSError):
            vine_protocol.note_host(self._directory)
        worker.announce("ctxflow")
        while not (worker.closed or self._worker_ended or self._may_end()):
            for key, _ in selector.select(self._timeout()):
                if key.fd in selector.get_map():  # An earlier one of this round may have removed it.
                    key.data()
            host.check()
            worker.nudge()
            if time.monotonic() >= self._look_at:
                self._look_at_wrapper()
        host.stop()
        if self._kept is not None:
            self._kept.close()
        if self._may_end():
            self._leave(death)

    def _timeout(self) -> float | None:
        due = [seconds for seconds in (self._host.timeout(), self._worker.due()) if seconds is not None]
        return min([*due, max(0.0, self._look_at - time.monotonic())])

    def _heard(self) -> None:
        for request in self._worker.requests():
            try:
                sealed = _content(request)
                call = OpenCall(request, self._instructions(sealed), sealed[:SEAL_BYTES])
            except Exception as error:
                self._refuse(OpenCall(request, [], b""), f"the call cannot be read: {error or type(error).__name__}")
            else:
                self._calls.begin(call)

    def _noticed(self) -> None:
        self._host.give_notice()  # First, so that the driver, which is told next, can rely on it.
        self._calls.report(NoticeGiven())

    def _hang_bell(self) -> None:
        """Report when something imports what the program lacks (worker_program.py)."""
        with contextlib.suppress(OSError):  # `WorkerFacts` says that the directory cannot be written.
            if (bell := worker_program.hang_bell(self._cache)) is not None:
                self._selector.register(bell, selectors.EVENT_READ, functools.partial(self._rung, bell))

    def _rung(self, bell: int) -> None:
        os.read(bell, select.PIPE_BUF)
        self._calls.report(ModulesLacking())

    def _lost(self) -> None:
        self._worker_ended = True

    def _answer(self, call: OpenCall, status: int = 0) -> None:
        complete(call.request.sandbox, call.outputs)
        answer = seal_answer(self._key, call.seal, b"".join(call.reports))
        self._worker.answer(call.request, base64.b64encode(answer), status)

    def _refuse(self, call: OpenCall, message: str) -> None:
        call.refuse(message)
        self._answer(call, 1)

    # --- instructions

    def _instructions(self, sealed: bytes) -> list[ToWorker]:
        """Return what a call asks for; raise `ValueError` if it cannot be read, or is not the driver's."""
        number, frames = open_call(self._key, self._name, sealed)
        if not self._once.take(number):
            raise ValueError(
                "it has come before, and no call counts twice: somebody between it and the driver repeats it"
            )
        if instructions := unframe(frames):
            return [TO_WORKER.open(head, body) for head, body in instructions]
        raise ValueError("it asks for nothing")

    def _carry_out(self, call: OpenCall, message: ToWorker) -> bool:
        try:
            return self._start(call, message)
        except Exception as error:
            text = f"the worker cannot carry out {type(message).__name__}: {type(error).__name__}: {error}"
            self._refuse(call, text)
            return False

    def _start(self, call: OpenCall, message: ToWorker) -> bool:
        """Start an instruction, and say whether that is all."""
        if isinstance(message, (AskFacts, Listen, LeaveWorker, FileMessage)):
            return self._start_own(call, message)
        at_once = isinstance(message, _ENDS_AT_ONCE)
        if isinstance(message, RunCall) and message.overlaps:
            at_once = True  # Its answer goes to whoever listens.
        elif isinstance(message, RunCall):
            if message.files is not None:
                inputs, outputs, _ = message.files
                message = dataclasses.replace(message, files=(inputs, outputs, call.request.sandbox))
                call.outputs = [target for _, target, _ in outputs]
            self._calls.wait_for_call(call, message.call, message.context)
        elif isinstance(message, BuildContext):
            self._calls.wait_for_load(call, message.context, message.key)
            files = self._find_files(message)
            if files is None:
                return False
            message = dataclasses.replace(message, files=files, states=self._states, sent=self._sent(message))
        elif isinstance(message, StageFiles):
            message = dataclasses.replace(message, cache=message.cache or self._cache)
            self._calls.wait_for_staging(call, message.context)
        self._host.handle(message)
        return at_once

    def _find_files(self, load: BuildContext) -> Mapping[str, str] | None:
        """Return the places of a context's files; None if one is missing in the cache, which is reported."""
        if load.cached_files is None:
            return load.files
        found = {name: cached(digest, source, self._cache) for name, (digest, source) in load.cached_files.items()}
        missing = [source for name, (_, source) in load.cached_files.items() if not os.path.exists(found[name])]
        if missing:
            text = f"{missing[0]} is not in the worker's cache: stage it there before the load"
            self._calls.report(BuildFailed(load.context, load.key, Trouble("exception", "FileNotFoundError", text)))
            return None
        return found

    def _sent(self, load: BuildContext) -> Mapping[str, tuple[str, str]]:
        """Return where those artifacts are that have come from other hosts."""
        found = {key: (digest, cached(digest, source, self._cache)) for key, (digest, source) in load.sent.items()}
        return {key: (digest, path) for key, (digest, path) in found.items() if os.path.exists(path)}

    def _start_own(self, call: OpenCall, message: AskFacts | Listen | LeaveWorker | FileMessage) -> bool:
        """Start what the host does not do itself; what may take long is done in the background."""

        def report(done: FromWorker) -> None:
            self._calls.finish(call, done)

        if isinstance(message, LeaveWorker):
            self._released = time.monotonic() + _RELEASE_SECONDS
            return True
        given = self._worker.given
        if isinstance(message, Listen):
            self._calls.listen(call)
        elif isinstance(message, AskFacts):
            self._host.in_background(lambda: self._facts(given.worker, given.cores), report)
        else:
            places = FilePlaces(call.request.sandbox, self._cache, self._kept, self._artifacts)
            self._host.in_background(lambda: vine_calls.carry_out(message, places), report)
        return False

    def _facts(self, worker: int, cores: int) -> WorkerFacts:
        facts = worker_facts(worker, cores, self._cache)
        store = ArtifactStore(os.path.join(self._directory, "artifacts"), WORKER_BYTES)
        if self._kept is None and (folder := os.environ.get("CTXFLOW_CACHE")):
            from ctxflow.host.cache_folder import is_shared_account  # Here: not every site has one.
            from ctxflow.host.host_cache import HostCache

            limit = _number(os.environ.get("CTXFLOW_CACHE_GB"))
            try:
                self._kept = HostCache(folder, None if limit is None else int(limit * 1e9))
                if not is_shared_account():  # Else others' jobs may have written there: it is programs that are run.
                    store = ArtifactStore(folder, self._kept.limit)
            except OSError as error:
                facts = dataclasses.replace(facts, kept_problem=error.strerror or str(error))
        if self._artifacts is None:
            self._artifacts = store
            self._host.keep_artifacts(store, self._calls.report)
        return dataclasses.replace(facts, kept="" if self._kept is None else self._kept.path)

    # --- the end

    def _may_end(self) -> bool:
        """Return whether the worker was released, and the answer to that is on its way."""
        return self._released < float("inf") and (self._worker.taken or time.monotonic() > self._released)

    def _leave(self, death: int) -> None:
        """End the worker, first of all: else TaskVine would count the end of this process as a failure.

        :param death: readable when the vine_worker has ended.
        """
        self._end_worker()
        if not readable(death, _FAREWELL_SECONDS):
            self._end_vine_worker()  # The wrapper does nothing: whoever stopped it has stopped it alone.

    def _end_worker(self) -> None:
        wrapper = os.environ.get("CTXFLOW_WORKER_PID")
        with contextlib.suppress(ProcessLookupError):
            if wrapper:
                os.kill(int(wrapper), signal.SIGUSR1)
            else:
                self._end_vine_worker()

    def _end_vine_worker(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker.given.worker, signal.SIGTERM)

    def _look_at_wrapper(self) -> None:
        """Report, once, a wrapper that stays stopped: it passes no notice on, and does not end the worker."""
        wrapper = os.environ.get("CTXFLOW_WORKER_PID")
        stopped = wrapper is not None and is_stopped(int(wrapper))
        self._stopped = self._stopped + 1 if stopped else 0
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self._stopped == _STOPPED_LOOKS:
            self._calls.report(WorkerStuck(f"its wrapper, process {wrapper}, is stopped"))


def _content(request: Request) -> bytes:
    """Return what came with a call; raise `ValueError` if it cannot be read."""
    if request.name.startswith("="):
        return base64.b64decode(request.name[1:], validate=True)
    if request.name == "@":
        with open(os.path.join(request.sandbox, "call"), "rb") as file:
            return file.read()
    raise ValueError("its command begins with neither = nor @; do the driver and the worker run one ctxflow?")


def _restore_devices() -> None:
    """Give CUDA_VISIBLE_DEVICES the batch system's value again: the vine_worker numbers devices anew."""
    if "CTXFLOW_WORKER_PID" in os.environ:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if (devices := os.environ.get("CTXFLOW_CUDA_VISIBLE_DEVICES")) is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices


def worker_facts(worker: int, cores: int, cache: str) -> WorkerFacts:
    """Return what a worker tells about itself when it joins.

    From then on this process, and those that it starts, see their GPUs in the order of the machine's topology.

    :param worker: the vine_worker's process.
    :param cores: those that TaskVine gave the host, 0 if it gave none.
    """
    topology = machine_of([device.id for device in cuda_devices()])
    order_devices(topology)
    devices = cuda_devices()
    version, problem = _python_version()
    place = None
    try:
        os.makedirs(cache, exist_ok=True)
        place = os.stat(cache).st_dev
    except OSError as error:
        problem = problem or f"the worker's directory cannot be written: {error}"
    return WorkerFacts(
        host=socket.gethostname(),
        ctxflow=__version__,
        problem=problem,
        pid=os.getpid(),
        worker=os.environ.get("CTXFLOW_WORKER_NAME"),
        python=version,
        cores=cores or len(os.sched_getaffinity(0)),
        memory=_memory(),
        gpus=len(devices),
        gpu_model=devices[0].model if devices else None,
        gpu_memory=devices[0].memory if devices else None,
        scratch=os.path.dirname(cache),
        cache=cache,
        device=place,
        port=_transfer_port(worker),
        tier=os.environ.get("CTXFLOW_TIER"),
        region=os.environ.get("CTXFLOW_REGION"),
        job=os.environ.get("CTXFLOW_JOB"),
        machine=_machine(),
        devices=[device.id for device in devices],
        topology=to_graph(topology) if topology is not None else None,
        pin=_number(os.environ.get("CTXFLOW_PIN")),
        alike=digest_of(machine_facts()),
    )


def _machine() -> str | None:
    """Return what HTCondor (in the ad that it gives every job), Slurm or Kubernetes calls the machine."""
    with contextlib.suppress(OSError, KeyError), open(os.environ["_CONDOR_MACHINE_AD"]) as file:
        for line in file:
            name, _, value = line.partition("=")
            if name.strip().lower() == "machine":
                return value.strip().strip('"')
    return os.environ.get("CTXFLOW_MACHINE") or os.environ.get("SLURMD_NODENAME")


def _transfer_port(worker: int) -> int | None:
    """Return where the vine_worker serves files to its peers."""
    server = transfer_server(worker)
    return None if server is None else next(iter(listening_ports(server)), None)


def _python_version() -> tuple[str | None, str | None]:
    """Return the version of the Python that library processes run, and what is wrong with it."""
    if (program := interpreter()) == sys.executable:
        return platform.python_version(), None
    command = [program, "-c", "import platform; print(platform.python_version())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the Python that CTXFLOW_PYTHON names does not start: {error}"
    return done.stdout.strip(), None


def _memory() -> int:
    """Return the memory in bytes that the vine_worker gave its library, else the machine's."""
    given = _number(os.environ.get("MEMORY"))  # In MB.
    return int(given) << 20 if given else machine_memory()


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text) if text else None
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
