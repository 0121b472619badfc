"""vLLM's asynchronous engine and its processes: started, watched, and ended with all that they leave on the machine.

vLLM runs its engine in processes of its own, "EngineCore" and, as a rule, one worker for each GPU. They share memory
and sockets that have names; once all have found them the names are removed, so that nothing is left of them whoever is
killed. They end with the process that started them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import os
import signal
import time
import types
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

from ctxflow.errors import ContextLost, UsageError
from ctxflow.host.linux import descendants, die_with_parent, is_stopped
from ctxflow.host.local_files import OF_LIBRARY, Scratch, scratch_for_sockets
from ctxflow.models.results import MissingPackageError
from ctxflow.models.vllm_parts import add_parts, tell_imported, tell_tried
from ctxflow.models.vllm_schemas import bind_by_patterns
from ctxflow.models.weight_reading import finish_reading
from ctxflow.on_worker import load_part
from ctxflow.topology.machine import cuda_devices

SHARED_MEMORY = "/dev/shm"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_TICK_SECONDS = 1.0
_MOMENT_SECONDS = 0.3
_END_SECONDS = 5.0
_LONGEST_NAME = 36  # Of a socket of vLLM's.
_SOCKETS = "VLLM_RPC_BASE_PATH"


class VLLMProcesses:
    """vLLM's `AsyncLLM`, started on the running event loop; it belongs to that loop and the thread it runs in.

    :param arguments: of `ctxflow.models.vllm_options.parse_options`.
    :param silent_seconds: how long an engine that has requests may not answer even whether it is there. It answers
        between two steps: a step takes seconds, or minutes where it compiles.
    :param stopped_seconds: how long one of its processes may be stopped (SIGSTOP) while it has requests.
    :ivar client: the `AsyncLLM`.
    :raises MissingPackageError: where vLLM is not installed.
    :raises ctxflow.errors.UsageError: for options that vLLM refuses for this model, before weights are read.
    """

    def __init__(
        self, arguments: argparse.Namespace, *, silent_seconds: float = 300.0, stopped_seconds: float = 10.0
    ) -> None:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise MissingPackageError.about("vllm", extra="vllm", why=error) from error
        chosen = os.environ.get(_METHOD)
        try:
            with _inspecting_here():
                config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        except (ValueError, TypeError, NotImplementedError) as error:
            why = " ".join(str(error).split()).partition(" For further information")[0]
            raise UsageError(f"vLLM refuses these options for this model: {why}") from error
        if chosen != "spawn" and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            # On a CPU vLLM spawns its processes, each of which imports for 10 s what is here already, since it binds
            # their threads by variables that a library reads when it is loaded. Where it does not, it may fork them, as
            # it does where there is a GPU.
            os.environ[_METHOD] = "fork"
            if _on_cpu():  # Imported before the fork it is there for each of them, and known to zygotes from then on.
                importlib.import_module(config.parallel_config.worker_cls.rpartition(".")[0])
        if os.environ.get(_METHOD) != "spawn":
            finish_reading()
        self._silent_seconds, self._stopped_seconds = silent_seconds, stopped_seconds
        self._sleeps = bool(getattr(arguments, "enable_sleep_mode", False))
        self._in_flight = 0
        self._cause = ""
        self._closed = False
        self._why: asyncio.Task[str] | None = None
        before = set(descendants(os.getpid()))
        # Its processes -> when each began, since a number may be given again, and what it is called.
        self._started: dict[int, tuple[str, str]] = {}
        try:
            with load_part("engine"), _sockets_apart() as self._sockets, _ending_with_us():
                began = time.monotonic()
                self.client: Any = _binding(AsyncLLM, config).from_vllm_config(
                    config,
                    enable_log_requests=arguments.enable_log_requests,
                    disable_log_stats=arguments.disable_log_stats,
                )
                add_parts(self._sockets.path, began)
        except BaseException:
            self._note_processes(before)
            _kill(self._started)
            _unlink_shared(self._started)
            raise
        self._note_processes(before)
        _unlink_shared(self._started)
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        self._watching = loop.create_task(self._watch())

    async def connected(self) -> None:
        """Wait until it answers for the first time, and have nothing of it keep a name; to be called before all else.

        Its processes connect to their sockets on threads of their own, some after the engine says that it is ready.

        :raises ctxflow.errors.ContextLost: if it ends meanwhile.
        """
        with load_part("engine"):
            await self.run(self.client.reset_mm_cache())  # Of what it was tried with.
        self._sockets.close()

    @property
    def parks(self) -> bool:
        """Whether it can give up its GPUs' memory: it has none, or was started so that it can (`enable_sleep_mode`)."""
        return self._sleeps or not cuda_devices()

    async def park(self) -> None:
        """Have vLLM bring its weights to the host's memory, and drop its cache; nothing may be in flight."""
        if self._sleeps:
            await self.run(self.client.sleep(1))

    async def wake(self) -> None:
        """Have it answer again."""
        if self._sleeps:
            await self.run(self.client.wake_up())

    def _note_processes(self, before: Iterable[int]) -> None:
        for pid in set(descendants(os.getpid())).difference(before):
            if not _is_tracker(pid):
                self._started[pid] = _began(pid), _called(pid)

    async def run(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Return what a request gives, for which the engine is watched; cancelling this cancels it.

        :raises ctxflow.errors.ContextLost: where the engine ends meanwhile, or has ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        # In a task of its own, since vLLM answers one that is cancelled as if a client had left.
        asked = asyncio.ensure_future(request)
        asked.add_done_callback(_noted)
        self._in_flight += 1
        try:
            await asyncio.wait((asked, self._end), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise await self.lost()
            try:
                return asked.result()
            except EngineDeadError as error:
                raise await self.lost() from error
            except Exception as error:
                if self.dead:
                    raise await self.lost() from error
                raise
        finally:
            self._in_flight -= 1
            if not asked.done():
                asked.cancel()
                await asyncio.wait((asked,), timeout=_TICK_SECONDS)

    @property
    def dead(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._closed or bool(self.client.errored)

    async def lost(self) -> ContextLost:
        """Return why it is of no more use, after ending what is left of it; the same to all who ask."""
        if self._why is None:
            self._why = asyncio.create_task(self._find_why())
        return ContextLost(await asyncio.shield(self._why))

    async def _find_why(self) -> str:
        """Return which of its processes ended and how, as far as that is told within a moment."""
        if self._cause or self._closed:
            self.close()
            return self._cause or "vLLM's engine was closed"
        said, gone = "has failed", list[str]()
        ends = time.monotonic() + _TICK_SECONDS  # Where a worker died, EngineCore has said so, and is about to end.
        while time.monotonic() < ends:
            cores = [process for process in self._cores() if process.exitcode]
            if gone := gone or self._workers_gone():  # Which a killed EngineCore takes along.
                said = f"has lost its process {gone[0]}"
                ends = min(ends, time.monotonic() + _MOMENT_SECONDS)
            if cores and cores[0].exitcode < 0:
                said = f"has lost its process {cores[0].name}, killed by {signal.Signals(-cores[0].exitcode).name}"
                break
            await asyncio.sleep(0.02)
        self.close()
        return f"vLLM's engine {said}: what was printed before says more"

    def _workers_gone(self) -> list[str]:
        return [name for pid, (when, name) in self._started.items() if "Worker" in name and _began(pid) != when]

    def _cores(self) -> Sequence[Any]:
        return getattr(self.client.engine_core.resources.engine_manager, "processes", ())

    async def _watch(self) -> None:
        """End an engine that has requests and does not move, so that they fail instead of waiting for ever.

        One that has lost one of its workers ends here, too: EngineCore first waits nine seconds for the others, which
        wait for that.
        """
        stopped = silent = 0.0
        probe: asyncio.Future[Any] | None = None
        try:
            while not self.dead and not self._cause and not self._workers_gone():
                began = time.monotonic()
                await asyncio.sleep(_TICK_SECONDS)
                passed = min(time.monotonic() - began, 2 * _TICK_SECONDS)  # If this process was stopped too, no more.
                at_rest = [name for pid, name in self._living() if is_stopped(pid)]
                stopped = stopped + passed if at_rest and self._in_flight else 0.0
                if not self._in_flight:
                    silent = 0.0
                elif probe is None or probe.done():
                    silent, probe = 0.0, asyncio.ensure_future(self.client.is_sleeping())
                    probe.add_done_callback(_noted)
                else:
                    silent += passed
                if stopped >= self._stopped_seconds:
                    self._cause = f"vLLM's process {at_rest[0]} was stopped (SIGSTOP), for {stopped:.0f} s by now"
                elif silent >= self._silent_seconds:
                    self._cause = f"vLLM's engine has not answered for {silent:.0f} s (its option silent_seconds)"
        finally:
            if probe is not None:
                probe.cancel()
            if self._cause:
                _kill(self._started)
            if not self._end.done():
                self._end.set_result(None)

    def close(self) -> None:
        """End its processes, and remove what they shared; requests in flight end with an error."""
        if self._closed:
            return
        self._closed = True
        self._watching.cancel()
        self._sockets.close()
        if not self._end.done():
            self._end.set_result(None)
        with contextlib.suppress(AttributeError):
            self.client.engine_core.resources.engine_manager.manager_stopped.set()  # Else it reports a crash.
        self._note_late()
        _kill(self._started)
        with contextlib.suppress(Exception):  # The processes are gone: what else it cannot close ends with this one.
            self.client.shutdown(timeout=0.0)
        ends = time.monotonic() + _END_SECONDS
        while self._living() and time.monotonic() < ends:
            time.sleep(0.01)
        for process in self._cores():
            process.join(_TICK_SECONDS)

    def _note_late(self) -> None:
        """Add what its processes have started since."""
        for pid, _ in self._living():
            for child in descendants(pid):
                self._started.setdefault(child, (_began(child), _called(child)))
        _unlink_shared(self._started)

    def _living(self) -> list[tuple[int, str]]:
        return [(pid, name) for pid, (when, name) in self._started.items() if _began(pid) == when]


def _binding(client: Any, config: Any) -> Any:
    """Return a class of vLLM's client that has xgrammar bind answers to valid JSON; with guidance they are as it is."""
    if config.structured_outputs_config.backend == "guidance":
        return client

    class Binding(client):  # type: ignore[misc]
        def generate(self, prompt: Any, sampling_params: Any, *given: Any, **more: Any) -> Any:
            if sampling_params.structured_outputs is not None:
                bind_by_patterns(sampling_params.structured_outputs)
            return super().generate(prompt, sampling_params, *given, **more)

    return Binding


def _noted(task: asyncio.Future[Any]) -> None:
    """Look at an error that nobody waits for any more, which asyncio would report else."""
    if not task.cancelled():
        task.exception()


def _kill(started: Mapping[int, tuple[str, str]]) -> None:
    for pid, (when, _) in started.items():
        if _began(pid) == when:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _called(pid: int) -> str:
    """Return what a process calls itself, as "VLLM::EngineCore"."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().partition(b"\0")[0].decode(errors="replace").strip() or str(pid)
    return str(pid)


def _began(pid: int) -> str:
    """Return when a process began, in the kernel's count; "" of one that is gone or waits to be buried."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _is_tracker(pid: int) -> bool:
    """Return whether it is Python's process that removes the names of shared memory, which is not vLLM's alone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def _unlink_shared(pids: Iterable[int]) -> None:
    """Remove the names of the shared memory that processes have; they keep the memory, and it ends with them.

    Files are told by their numbers, since the C library gives a semaphore its name only after it was opened.
    """
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            for line in file:
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    mapped.add(int(fields[4]))
    if not mapped:
        return
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.inode() in mapped and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    os.unlink(entry.path)
                    _forget(entry.name)


def _forget(name: str) -> None:
    """Have Python's tracker, which spawned processes share with this one, not miss it at the end."""
    if os.environ.get(_METHOD) != "spawn":
        return
    if name.startswith("psm_"):
        resource_tracker.unregister(f"/{name}", "shared_memory")
    elif name.startswith("sem."):
        resource_tracker.unregister(f"/{name.removeprefix('sem.')}", "semaphore")


@contextlib.contextmanager
def _sockets_apart() -> Iterator[Scratch]:
    """Have vLLM's sockets in a folder of their own, of this user alone, which is to be removed once all are connected.

    It is removed here where the engine does not start.
    """
    inherited = os.environ.get(_SOCKETS)
    scratch = scratch_for_sockets(_LONGEST_NAME)
    os.environ[_SOCKETS] = scratch.path
    try:
        yield scratch
    except BaseException:
        scratch.close()
        raise
    finally:
        if inherited is None:
            os.environ.pop(_SOCKETS, None)
        else:
            os.environ[_SOCKETS] = inherited


def _on_cpu() -> bool:
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


@contextlib.contextmanager
def _inspecting_here() -> Iterator[None]:
    """Have vLLM import a model's class in this process, to learn what it can do, where no GPU is used.

    By default vLLM imports it in a subprocess, since importing it may initialize CUDA, after which no process can be
    forked. The subprocess imports all of vLLM again, for 10 s; here its own imports stay, and forked workers have them.
    """
    registry = importlib.import_module("vllm.model_executor.models.registry")
    own = getattr(registry, "_run_in_subprocess", None)
    if own is None or not _on_cpu():
        yield
        return
    vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()
    try:
        yield
    finally:
        vars(registry)["_run_in_subprocess"] = own


_STARTED = {
    "core": ("vllm.v1.engine.core", "EngineCoreProc", "run_engine_core"),
    "worker": ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_main"),
}
"""What vLLM's processes run: modules, classes and their functions."""
_replaced: dict[str, Any] = {}  # What `_tied` stands in the place of; a forked process inherits that.


@contextlib.contextmanager
def _ending_with_us() -> Iterator[None]:
    """Have EngineCore, if it is started meanwhile, killed when this process ends, which vLLM does not see to.

    Its workers end with it; by themselves they would, but in their own time.
    """
    own = _tie("core")
    try:
        yield
    finally:
        if own is not None:
            setattr(*own)
        _replaced.clear()


def _tie(kind: str) -> tuple[Any, str, Any] | None:
    """Have processes of a kind run `_tied`; return what undoes that, None where vLLM has no such kind."""
    module, name, function = _STARTED[kind]
    found = getattr(importlib.import_module(module), name, None)
    own = vars(found).get(function)
    if own is None:
        return None
    _replaced[kind] = getattr(found, function)
    setattr(found, function, staticmethod(functools.partial(_tied, os.getpid(), kind)))
    return found, function, own


def _tied(parent: int, kind: str, *args: Any, **kwargs: Any) -> None:
    """Be one of vLLM's processes, forked or spawned for that, and be killed when its parent ends."""
    die_with_parent(parent)
    module, name, function = _STARTED[kind]
    run = _replaced.pop(kind, None) or getattr(getattr(importlib.import_module(module), name), function)
    tell_imported(os.environ[_SOCKETS])
    if kind == "core":
        _tie("worker")
        tell_tried(os.environ[_SOCKETS])
        _meet_in_library_scratch()
    elif _on_cpu():
        _keep_generators()
    run(*args, **kwargs)


def _keep_generators() -> None:
    """Sample tokens that are discarded without the generators of seeded requests, on a CPU.

    With chunked prefill, vLLM (0.32) samples a token after each chunk of a prompt and discards all but the last. It
    then rewinds the request's generator by an offset, which CPU generators do not have: the error ended the engine.
    """
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    sample = runner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(self: Any, *given: Any, **named: Any) -> Any:
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        unused = {index: generators.pop(index) for index in list(generators) if discarded[index]}
        try:
            return sample(self, *given, **named)
        finally:
            generators.update(unused)

    runner.sample_tokens = sample_tokens


def _meet_in_library_scratch() -> None:
    """Have the file by which vLLM's workers find each other, which killed ones leave, go with the library process."""
    folder = os.environ.get(OF_LIBRARY)
    utilities = importlib.import_module("vllm.utils.network_utils")
    if folder and hasattr(utilities, "tempfile"):
        vars(utilities)["tempfile"] = types.SimpleNamespace(gettempdir=lambda: folder)
