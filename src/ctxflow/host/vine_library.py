"""The context host of a TaskVine worker: its one library, to which every TaskVine call goes.

A call's command is one token: `=` and its instructions (frames of wire.py, with a seal) in base64, or `@`, and then
they are the content of the file `call` in its sandbox. Its answer is the reports, sealed, in base64. Beside the
instructions of host.py there are `hello`, `listen` (for what nobody asked for: an eviction notice, the death of an
idle library process, an import of what the program
lacks), `release` (the worker), and those for files: `seed`, `fetch`, `link`, `forget`,
`send_state`, `take_state` (vine_files.py).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence

from ctxflow.host import rest, vine_files
from ctxflow.host.descriptors import readable
from ctxflow.host.facts import facts
from ctxflow.host.folder_files import complete
from ctxflow.host.host import Host, on_signal
from ctxflow.host.processes import adopt_orphans, kill_children, process_state
from ctxflow.host.seal import SIZE, Once, key_of, open_call, seal_answer
from ctxflow.host.staging import cached
from ctxflow.host.vine_calls import Call, Calls
from ctxflow.host.vine_protocol import Request, VineWorker, parse
from ctxflow.host.wire import Head, unframe

_RELEASE_SECONDS = 1.0  # How long the answer to a release may take to be read.
_LOOK_SECONDS = 5.0
_STOPPED_LOOKS = 3
_FAREWELL_SECONDS = 5.0  # How long the vine_worker may take to end.
_ENDS_AT_ONCE = ("unload", "interrupt", "function", "forget_functions", "drain", "ping")


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

    :param directory: where it keeps its files, on the disk of the vine_worker's sandboxes, so that these can be
        hard-linked.
    :param logs: where the library processes' output is kept.
    """

    def __init__(self, worker: VineWorker, directory: str, logs: str) -> None:
        self._worker = worker
        self._selector = selectors.DefaultSelector()
        self._cache = os.path.join(directory, "ctxflow-cache")
        self._states = vine_files.states_folder(self._cache)
        with contextlib.suppress(OSError):  # What cannot be written fails later, as a report.
            os.makedirs(logs, exist_ok=True)
        self._calls = Calls(self._carry_out, self._answer)
        self._host = Host(self._calls.report, self._selector, os.path.join(directory, "contexts"), logs)
        self._released = float("inf")  # When the worker ends, whether its last answer has been read or not.
        self._worker_ended = False
        self._look_at = 0.0
        self._stopped = 0  # Looks in a row at which the wrapper was stopped.
        self._own: dict[str, Callable[[Call, Head], bool]] = {
            "hello": self._hello,
            "listen": self._listen,
            "release": self._release,
            "seed": self._seed,
            "fetch": self._fetch,
            "link": self._link,
            "forget": self._forget,
            "send_state": self._send_state,
            "take_state": self._take_state,
            "environment": self._environment,
        }
        self._pid_file = os.path.join(directory, "host.pid")
        self._name = os.environ.get("CTXFLOW_WORKER_NAME", "")
        self._key = bytes.fromhex(os.environ.pop("CTXFLOW_KEY", "")) or key_of(b"")
        self._once = Once()

    # --- the loop

    def serve(self) -> None:
        """Answer calls until the worker is released or gone."""
        selector, worker, host = self._selector, self._worker, self._host
        death = os.pidfd_open(worker.given.worker)
        selector.register(death, selectors.EVENT_READ, self._lost)
        selector.register(worker, selectors.EVENT_READ, self._heard)
        on_signal(signal.SIGCHLD, selector, host.bury_orphans)
        on_signal(signal.SIGTERM, selector, self._noticed)
        self._hang_bell()
        self._write_pid()
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
        if self._may_end():
            self._end_worker()
            # Were this process to end first, TaskVine would count that as a failure of the library.
            if not readable(death, _FAREWELL_SECONDS):
                self._end_vine_worker()  # The wrapper does nothing: whoever stopped it has stopped it alone.

    def _timeout(self) -> float | None:
        due = [seconds for seconds in (self._host.timeout(), self._worker.due()) if seconds is not None]
        return min([*due, max(0.0, self._look_at - time.monotonic())])

    def _heard(self) -> None:
        for request in self._worker.requests():
            try:
                sealed = _content(request)
                call = Call(request, self._instructions(sealed), sealed[:SIZE])
            except Exception as error:
                self._refuse(Call(request, [], b""), f"the call cannot be read: {error or type(error).__name__}")
            else:
                self._calls.begin(call)

    def _noticed(self) -> None:
        self._host.give_notice()  # First, so that whoever hears of the notice can rely on it.
        self._calls.report({"is": "notice"}, b"")

    def _hang_bell(self) -> None:
        """Hear of it when something imports what the program lacks (rest.py)."""
        try:
            bell = rest.hang_bell(self._cache)
        except OSError:  # `hello` tells of a directory that cannot be written.
            return
        if bell is not None:
            self._selector.register(bell, selectors.EVENT_READ, lambda: self._rung(bell))

    def _rung(self, bell: int) -> None:
        os.read(bell, select.PIPE_BUF)
        self._calls.report({"is": "lacks"}, b"")

    def _lost(self) -> None:
        self._worker_ended = True

    def _answer(self, call: Call, status: int = 0) -> None:
        complete(call.request.sandbox, call.outputs)
        answer = seal_answer(self._key, call.seal, b"".join(call.reports))
        self._worker.answer(call.request, base64.b64encode(answer), status)

    def _refuse(self, call: Call, message: str) -> None:
        call.refuse(message)
        self._answer(call, 1)

    def _write_pid(self) -> None:
        """Tell the wrapper (worker.py) whom to pass an eviction notice on to."""
        with contextlib.suppress(OSError):
            with open(self._pid_file + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(self._pid_file + ".new", self._pid_file)

    # --- instructions

    def _instructions(self, sealed: bytes) -> list[tuple[Head, bytes]]:
        """What a call asks for.

        :raises ValueError: if it cannot be read, or is not the driver's.
        """
        number, frames = open_call(self._key, self._name, sealed)
        if not self._once.take(number):
            raise ValueError(
                "it has come before, and no call counts twice: somebody between it and the driver repeats it"
            )
        if instructions := unframe(frames):
            return instructions
        raise ValueError("it asks for nothing")

    def _carry_out(self, call: Call, head: Head, body: bytes) -> bool:
        try:
            return self._start(call, head, body)
        except Exception as error:
            message = f"the worker cannot {head.get('do')} it: {type(error).__name__}: {error}"
            self._refuse(call, message)
            return False

    def _start(self, call: Call, head: Head, body: bytes) -> bool:
        """Start an instruction, and say whether that is all."""
        do = head["do"]
        if do == "call":
            head["states"] = self._states
            if "files" in head:
                head["files"]["sandbox"] = call.request.sandbox
                call.outputs = [target for _, target, _ in head["files"]["outputs"]]
            self._calls.wait_for_call(call, head["call"], head["context"])
        elif do == "load":
            self._calls.wait_for_load(call, head["context"], head.get("key", ""))
            if not self._find_files(head):
                return False
        elif do == "stage":
            head.setdefault("cache", self._cache)
            self._calls.wait_for_staging(call, head["context"])
        elif do not in _ENDS_AT_ONCE:
            return self._own[do](call, head)
        self._host.handle(head, body)
        return do in _ENDS_AT_ONCE

    def _find_files(self, head: Head) -> bool:
        """Put the cache's places of `cached_files` in a load; False if one is missing, which is reported."""
        if "cached_files" not in head:
            return True
        found = {name: cached(digest, source, self._cache) for name, (digest, source) in head["cached_files"].items()}
        missing = [source for name, (_, source) in head["cached_files"].items() if not os.path.exists(found[name])]
        if missing:
            failure = {
                "kind": "exception",
                "error": "FileNotFoundError",
                "message": f"{missing[0]} is not in the worker's cache: stage it there before the load",
            }
            report = {"is": "failed", "context": head["context"], "key": head.get("key", ""), "failure": failure}
            self._calls.report(report, b"")
            return False
        head["files"] = found
        return True

    def _hello(self, call: Call, head: Head) -> bool:
        def work() -> Head:
            return facts(self._worker.given.worker, self._worker.given.cores, self._cache)

        self._host.in_background(work, lambda report: self._calls.finish(call, report))
        return False

    def _listen(self, call: Call, head: Head) -> bool:
        self._calls.listen(call)
        return False

    def _release(self, call: Call, head: Head) -> bool:
        self._released = time.monotonic() + _RELEASE_SECONDS
        return True

    def _seed(self, call: Call, head: Head) -> bool:
        sandbox = call.request.sandbox
        return self._with_files(call, head, lambda: vine_files.seed(sandbox, head))

    def _fetch(self, call: Call, head: Head) -> bool:
        sandbox = call.request.sandbox
        return self._with_files(call, head, lambda: vine_files.fetch(sandbox, head, self._cache))

    def _link(self, call: Call, head: Head) -> bool:
        return self._with_files(call, head, lambda: vine_files.link(head["path"], head, self._cache))

    def _forget(self, call: Call, head: Head) -> bool:
        return self._with_files(call, head, lambda: vine_files.forget(head["digest"], self._cache))

    def _send_state(self, call: Call, head: Head) -> bool:
        sandbox = call.request.sandbox
        return self._with_files(call, head, lambda: vine_files.send_state(sandbox, head, self._states))

    def _take_state(self, call: Call, head: Head) -> bool:
        sandbox = call.request.sandbox
        return self._with_files(call, head, lambda: vine_files.take_state(sandbox, head, self._states))

    def _environment(self, call: Call, head: Head) -> bool:
        """Have library processes run the Python of a packed environment that is in the cache."""
        return self._with_files(call, head, lambda: vine_files.environment(head, self._cache))

    def _with_files(self, call: Call, head: Head, work: Callable[[], Head]) -> bool:
        """Do something that may take long to files, and report it, or why it failed."""
        self._host.in_background(
            lambda: vine_files.reported(work, head), lambda report: self._calls.finish(call, report)
        )
        return False

    # --- the end

    def _may_end(self) -> bool:
        """Whether the worker was released, and the answer to that is on its way."""
        return self._released < float("inf") and (self._worker.taken or time.monotonic() > self._released)

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
        """A wrapper that stays stopped passes no notice on, and does not end the worker: that is told, once."""
        wrapper = os.environ.get("CTXFLOW_WORKER_PID")
        stopped = wrapper is not None and process_state(int(wrapper)) in ("T", "t")
        self._stopped = self._stopped + 1 if stopped else 0
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self._stopped == _STOPPED_LOOKS:
            self._calls.report({"is": "stuck", "reason": f"its wrapper, process {wrapper}, is stopped"}, b"")


def _content(request: Request) -> bytes:
    """What came with a call.

    :raises ValueError: if it cannot be read.
    """
    if request.name.startswith("="):
        return base64.b64decode(request.name[1:], validate=True)
    if request.name == "@":
        with open(os.path.join(request.sandbox, "call"), "rb") as file:
            return file.read()
    raise ValueError("its command begins with neither = nor @; do the driver and the worker run one ctxflow?")


def _restore_devices() -> None:
    """Give CUDA_VISIBLE_DEVICES the value that the batch system gave it: the vine_worker numbers devices anew."""
    if "CTXFLOW_WORKER_PID" not in os.environ:
        return
    devices = os.environ.get("CTXFLOW_CUDA_VISIBLE_DEVICES")
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
