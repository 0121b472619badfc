"""Wait in tests: for a condition, a future, an event, a process, a thread, or a line of output.

A deadline ends a hang and asserts nothing: each is far beyond what a busy machine needs, and all scale with the
environment variable CTXFLOW_TEST_PATIENCE (1.0 where it is not set). When one passes, `DeadlinePassed` has what was
waited for, the last value or error, the status of the runs in this process, the processes below it, and stacks.

Only the standard library is needed here: programs in the testbed import this module from the checkout, too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import linecache
import os
import select
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
What = str | Callable[[], str]
"""What is waited for: a text, or a function that returns it, called once a deadline has passed."""

SECONDS = 120.0
"""How long to wait before it is called a hang, where nothing else is said."""
FOREVER = 1e6
"""How long what is to be ended takes, in seconds: it does not end by itself before a deadline."""
LONGEST_PAUSE = 0.1
_STATUS_SECONDS, _SAMPLE_SECONDS, _DUMP_SECONDS, _DUMPS = 5.0, 0.2, 10.0, 8
_RUNNERS = {"_pytest", "pytest", "pluggy", "xdist", "execnet"}
"""Folders of what calls the tests."""
_LONGEST_VALUE, _LONGEST_COMMAND = 2000, 160


class DeadlinePassed(AssertionError):
    """What was waited for did not happen."""


def patience(seconds: float = SECONDS) -> float:
    """Return how long to wait, in seconds, for what should take far less than `seconds` on a busy machine."""
    return seconds * float(os.environ.get("CTXFLOW_TEST_PATIENCE") or 1.0)


def eventually(
    condition: Callable[[], T],
    *,
    within: float = SECONDS,
    what: What = "",
    run: Any = None,
    retry: tuple[type[Exception], ...] = (),
    pause: float = LONGEST_PAUSE,
) -> T:
    """Wait until a condition holds, and return its value.

    :param within: seconds, which `patience` scales.
    :param what: is waited for, if the condition's source does not say it.
    :param run: an executor or a run whose status a failure shows; all runs of this process by default.
    :param retry: errors of the condition after which it is tried again.
    :param pause: the longest between two tries, in seconds; the first are 1 ms apart.
    :raises DeadlinePassed: if it does not come to hold.
    """
    waiting = _Waiting(what or _source(condition), within, run)
    while True:
        try:
            if found := condition():
                return found
            waiting.last = found
        except retry as error:
            waiting.last = error
        time.sleep(waiting.pause(pause))


def nothing_left(find: Callable[[], Any], *, within: float = SECONDS, what: What = "", run: Any = None) -> None:
    """Wait until a function finds nothing, such as processes or files; a failure shows what it found last."""
    waiting = _Waiting(what or _source(find), within, run)
    while found := find():
        waiting.last = found
        time.sleep(waiting.pause(LONGEST_PAUSE))


async def eventually_async(
    condition: Callable[[], T], *, within: float = SECONDS, what: What = "", run: Any = None
) -> T:
    """Wait as `eventually` does, and let the event loop's other tasks go on."""
    waiting = _Waiting(what or _source(condition), within, run)
    while not (found := condition()):
        waiting.last = found
        await asyncio.sleep(waiting.pause(LONGEST_PAUSE))
    return found


Finished = TypeVar("Finished", bound="concurrent.futures.Future[Any]")


def finished(future: Finished, *, within: float = SECONDS, what: What = "", run: Any = None) -> Finished:
    """Wait until a future has a result or an exception, and return the future."""
    try:
        future.exception(patience(within))
    except concurrent.futures.CancelledError:
        pass
    except concurrent.futures.TimeoutError:
        raise DeadlinePassed(report(what or f"the end of {future!r}", patience(within), run=run)) from None
    return future


def happened(event: Any, *, within: float = SECONDS, what: What = "") -> bool:
    """Wait until an event of `threading` or `multiprocessing` is set."""
    if not event.wait(patience(within)):
        raise DeadlinePassed(report(what or f"{event!r}", patience(within)))
    return True


def joined(thread: Any, *, within: float = SECONDS, what: What = "") -> None:
    """Wait until a thread, or a process of `multiprocessing`, has ended."""
    thread.join(patience(within))
    if thread.is_alive():
        raise DeadlinePassed(report(what or f"the end of {thread!r}", patience(within)))


def exited(process: subprocess.Popen[Any], *, within: float = SECONDS, what: What = "") -> int:
    """Wait until a program has ended, and return its exit status."""
    try:
        return process.wait(timeout=patience(within))
    except subprocess.TimeoutExpired:
        raise DeadlinePassed(report(what or f"the end of {process!r}", patience(within))) from None


def output(process: subprocess.Popen[Any], *, within: float = SECONDS, what: What = "") -> tuple[Any, Any]:
    """Wait until a program has ended, and return the rest of its output and of its standard error."""
    try:
        return process.communicate(timeout=patience(within))
    except subprocess.TimeoutExpired:
        raise DeadlinePassed(report(what or f"the end of {process!r}", patience(within))) from None


def gone(pid: int, *, within: float = SECONDS, what: What = "") -> None:
    """Wait until there is no process of a number, or none but a zombie; it need not be a child of this process."""
    what = what or f"the end of process {pid}"
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # Neither has every system them, nor every sandbox.
        eventually(lambda: _state(pid) in "ZX", within=within, what=what)
        return
    try:
        waited = select.poll()
        waited.register(end, select.POLLIN)
        if not waited.poll(1000 * patience(within)):
            raise DeadlinePassed(report(what, patience(within)))
    finally:
        os.close(end)


def looked(run: Any, times: int, *, within: float = SECONDS) -> None:
    """Wait until a run's loop has looked so many times at what it looks at each second, all begun after this call."""
    for _ in range(times + 1):
        due = run._tick_due
        eventually(lambda due=due: run._tick_due > due, within=within, run=run)  # type: ignore[misc]


def line(stream: Any, *, within: float = SECONDS, what: What = "") -> Any:
    """Wait for the next line of a program's output, and return it; an empty one at the end of the output."""
    read: list[Any] = []

    def reading() -> None:
        try:
            read.append(stream.readline())
        except BaseException as error:
            read.append(error)

    reader = threading.Thread(target=reading, name="waiting-for-a-line", daemon=True)
    reader.start()
    joined(reader, within=within, what=what or f"a line of {stream!r}")
    if isinstance(read[0], BaseException):
        raise read[0]
    return read[0]


def scale_timeouts(items: Iterable[Any], default: float) -> None:
    """Have the timeouts of tests scale, too: to be called once all marks are set.

    :param items: pytest's.
    :param default: of tests without a mark, in seconds.
    """
    import pytest

    for item in items:
        mark = item.get_closest_marker("timeout") or pytest.mark.timeout(default).mark
        args, named = mark.args, dict(mark.kwargs)
        if args:
            args = (patience(args[0]), *args[1:])
        else:
            named["timeout"] = patience(named.get("timeout", default))
        item.add_marker(pytest.mark.timeout(*args, **named), append=False)


# --- what a failure tells


def report(what: What, seconds: float, last: Any = None, run: Any = None) -> str:
    """Return what is known where something did not happen in so many seconds."""
    parts = [
        f"{what if isinstance(what, str) else what()}: it did not happen in {seconds:.0f} s",
        f"Last: {_value(last)}",
    ]
    facts: list[Callable[[], list[str]]] = [lambda: _runs(run), _processes, _stacks]
    for about in facts:
        try:
            parts += about()
        except Exception as error:
            parts.append(f"(unknown, for {type(error).__name__}: {error})")
    return "\n".join(parts)


class _Waiting:
    """One wait: how long to pause, and what to tell at its end."""

    def __init__(self, what: What, within: float, run: Any) -> None:
        self.what, self.seconds, self.run = what, patience(within), run
        self.begun = self.resumed = time.monotonic()
        self.last: Any = None

    def pause(self, longest: float) -> float:
        """Return the seconds to pause: a twentieth of those waited so far, or four times what the last try took.

        :raises DeadlinePassed: if too many are.
        """
        now = time.monotonic()
        waited, tried = now - self.begun, now - self.resumed
        if waited > self.seconds:
            cause = self.last if isinstance(self.last, BaseException) else None
            raise DeadlinePassed(report(self.what, self.seconds, self.last, self.run)) from cause
        pause = min(longest, max(0.001, waited / 20, 4 * tried))
        self.resumed = now + pause
        return pause


def _source(condition: Any) -> str:
    """Say where a condition is, and its first line."""
    code = getattr(condition, "__code__", None)
    if code is None or hasattr(condition, "__self__"):  # Of a method, what it is bound to says more.
        return repr(condition)
    place = f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
    return f"{linecache.getline(code.co_filename, code.co_firstlineno).strip()} ({place})"


def _value(value: Any) -> str:
    try:
        if isinstance(value, BaseException):
            text = "".join(traceback.format_exception(type(value), value, value.__traceback__)).strip()
        else:
            text = repr(value)
    except Exception as error:
        text = f"{type(value).__name__}, whose repr raises {type(error).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


def _runs(run: Any) -> list[str]:
    """The status of a run, or of all in this process: each is asked on a thread, since its lock may be held."""
    loops = sys.modules.get("ctxflow.executors.run_loop")
    if run is not None:
        runs = [run]
    elif loops is None:
        return []
    else:
        runs = [each for each in gc.get_objects() if loops.RunLoop in type(each).__mro__ and not each._ended.is_set()]
    told = []
    for each in runs:
        answer = ["it does not answer"]

        def ask(each: Any = each, answer: list[str] = answer) -> None:
            try:
                answer[0] = repr(each.status())
            except Exception as error:
                answer[0] = f"{type(error).__name__}: {error}"

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_STATUS_SECONDS)
        told.append(f"Run {each!r}: {answer[0]}")
    return told


def _processes() -> list[str]:
    """The processes below this one, and the stacks of those that run Python."""
    if not os.path.isdir("/proc/self"):
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))):
            children.setdefault(int(stat[1]), []).append(int(name))
    found: list[tuple[int, int]] = []
    left = [(pid, 0) for pid in children.get(os.getpid(), ())]
    while left:
        pid, depth = left.pop()
        found.append((pid, depth))
        left += [(child, depth + 1) for child in children.get(pid, ())]
    before = {pid: _cpu(pid) for pid, _ in found}
    time.sleep(_SAMPLE_SECONDS)
    lines = [f"Processes below {os.getpid()} (pid, state, CPU seconds, share of a core now, waits in, command):"]
    for pid, depth in found:
        used = _cpu(pid)
        share = (used - before[pid]) / _SAMPLE_SECONDS
        where = _read(pid, "wchan").strip("0") or "-"
        lines.append(f"{'  ' * depth}  {pid} {_state(pid)} {used:.2f} {share:.0%} {where} {_command(pid)}")
    programs = [(int(stat[19]), pid) for pid, _ in found if "python" in _command(pid) and (stat := _stat(pid))]
    # The test's own are the latest: servers that many tests fork from have been there for longer.
    return lines + _dumps([pid for _, pid in sorted(programs, reverse=True)])


def _dumps(pids: list[int]) -> list[str]:
    """The stacks of processes that run Python, where py-spy is installed; else what their threads wait in."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    lines = []
    for pid in pids[:_DUMPS]:
        text = ""
        if spy is not None:
            try:
                words = [spy, "dump", "--nonblocking", "--pid", str(pid)]
                text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_DUMP_SECONDS).stdout
            except (OSError, subprocess.SubprocessError):
                text = ""
        lines += [f"Stacks of {pid}:", text or _threads(pid)]
    return lines


def _threads(pid: int) -> str:
    """The threads of a process: name, state, and what each waits in, with the kernel's stack for root."""
    lines = []
    try:
        tasks = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return "  (gone)"
    for task in tasks:
        name, where = _read(pid, f"task/{task}/comm").strip(), _read(pid, f"task/{task}/wchan")
        call = _read(pid, f"task/{task}/syscall").split(" ")[0].strip()
        stack = [each.split()[-1] for each in _read(pid, f"task/{task}/stack").splitlines()]
        lines.append(f"  {task} {name} {_state(pid, task)} wchan {where} system call {call} {' < '.join(stack)}")
    return "\n".join(lines)


def _stacks() -> list[str]:
    """The stacks of this process's threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for number, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(number, number)}:")
        shown = [
            each for each in traceback.extract_stack(frame) if not _RUNNERS.intersection(Path(each.filename).parts)
        ]
        lines.append("".join(traceback.format_list(shown)).rstrip())
    return lines


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int, task: int | str = "") -> list[str]:
    """The fields after the command's name: state, parent, and so on; none if there is no such process."""
    return _read(pid, f"task/{task}/stat" if task else "stat").rpartition(")")[2].split()


def _state(pid: int, task: int | str = "") -> str:
    return (_stat(pid, task) or ["X"])[0]


def _cpu(pid: int) -> float:
    stat = _stat(pid)
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _command(pid: int) -> str:
    words = _read(pid, "cmdline").replace("\0", " ").replace("\n", " ").strip() or f"[{_read(pid, 'comm').strip()}]"
    return words[:_LONGEST_COMMAND]
