"""What people read when something is wrong: the errors, and how messages count and name things."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BREAKS = re.compile("[\t-\r\x1c-\x1e\x85\u2028\u2029]")
_LONGEST = 2000  # Characters of a message; of one that quotes more than that, the beginning and the end are kept.


def visible(text: str) -> str:
    """Return text without what a terminal would obey: all control characters but the tab and the end of a line.

    What only turns the direction of letters round is left out too: it shows what is not there.
    """
    return _COMMANDS.sub("", text) if _COMMANDS.search(text) else text


def one_line(text: str, most: int = _LONGEST) -> str:
    r"""Return a message on one line, without control characters; of a long one, its beginning and its end.

    Messages quote names and values of files, of other programs and of requests, which may hold anything.

    :param most: characters.

    >>> one_line("one\n  two\x1b[2J"), one_line("x" * 50 + "y" * 50, 12)
    ('one two[2J', 'xxxxxxxx...y')
    """
    parts = (part.strip() for part in _BREAKS.split(text))
    joined = visible(" ".join(filter(None, parts))).strip().encode("utf-8", "backslashreplace").decode()
    return joined if len(joined) <= most else f"{joined[: 2 * most // 3]}...{joined[len(joined) - most // 3 + 3 :]}"


class CtxflowError(Exception):
    """Any error of ctxflow's own."""


class UsageError(CtxflowError, ValueError):
    """What was asked for is refused before anything was started; another request would do. Exit status 2.

    :param sentences: what is wrong, each a line; of several, the first introduces the others.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(*map(one_line, sentences))

    def __str__(self) -> str:
        return "\n  - ".join(self.args)


class InputError(ValueError):
    """A file, or what is in it, cannot be used; the message is one line, whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class BusyError(CtxflowError, InputError):
    """Another program writes there: the same goes on once that has ended."""


class CallError(CtxflowError):
    """A call that failed. Its attributes are what the worker saw.

    :ivar remote_traceback: the traceback on the worker, "" where there was none.
    :ivar output: the last lines that the call printed.
    :ivar worker: where it happened last, on the machine `host`; "" where no worker had it.
    """

    def __init__(
        self, message: str, remote_traceback: str = "", output: str = "", worker: str = "", host: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remote_traceback = remote_traceback
        self.output = output
        self.worker, self.host = worker, host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.remote_traceback, self.output, self.worker, self.host)


class RemoteError(CallError):
    """The app raised an exception that cannot be had here; the message names it."""


class CallCrashed(CallError):
    """The library process died during the call."""


class CallTimeout(CallError, TimeoutError):
    """The call took longer than its timeout, and was stopped."""


class WorkersLost(CallError):
    """The workers that ran the call were lost too often, without notice."""


class ContextError(CallError):
    """The context could not be built on any worker, so that no call of the app can run."""


class ContextLost(CtxflowError):
    """Raise it in an app whose context is of no more use, as an engine that died: its library process is ended.

    What was in flight there runs again, elsewhere or on a context built anew.
    """


class ItemRefused(CtxflowError, ValueError):
    """Raise it in an app of one item for an item that nobody could answer: it fails at once, and is not tried again."""


class BatchContractError(CtxflowError, TypeError, ValueError):
    """A batch app did not give one result for each item of its batch, so that nobody can tell whose the results are."""


class RunEnded(CtxflowError):
    """The run was stopped before the call was answered."""


class DependencyFailed(CtxflowError):
    """An item of a map, or a part of one, was a future that failed; why is the cause of this error."""


class TurnOver(CtxflowError, EOFError):
    """A session's turn, or the session, is over, and no chunk is left of it."""


class RemoteTraceback(Exception):
    """The cause of an exception that was raised on a worker: its traceback there, as text.

    :ivar worker: where it was raised, on the machine `host`.
    """

    def __init__(self, text: str, worker: str = "", host: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.worker, self.host = worker, host

    def __str__(self) -> str:
        return f"on the worker{f' on {self.host}' if self.host else ''}\n{self.text}"


class ErrorNote(Exception):
    """The cause of an exception that says more about it, for Pythons without notes."""


def add_note(error: BaseException, text: str) -> None:
    """Add to an error's traceback and `__notes__`; before Python 3.11, whose tracebacks know no notes, to its cause."""
    if hasattr(error, "add_note"):
        error.add_note(text)
        return
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), text]
    if isinstance(error.__cause__, RemoteTraceback):
        cause = error.__cause__
        error.__cause__ = RemoteTraceback(f"{cause.text.rstrip()}\n{text}", cause.worker, cause.host)
    elif error.__cause__ is None:
        error.__cause__ = ErrorNote(text)
    elif isinstance(error.__cause__, ErrorNote):
        error.__cause__ = ErrorNote(f"{error.__cause__}\n{text}")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun; `nouns` is the plural where an s does not make it.

    >>> counted(1, "call"), counted(1200, "map"), counted(2, "process", "processes")
    ('1 call', '1,200 maps', '2 processes')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def article(noun: str) -> str:
    """Return a noun, such as the name of a type, behind its article.

    >>> article("object"), article("list"), article("MPIJob"), article("function")
    ('an object', 'a list', 'an MPIJob', 'a function')
    """
    spelled = noun[:2].isupper()  # An acronym, which is read letter by letter.
    return f"{'an' if noun[:1] in ('AEFHILMNORSX' if spelled else 'aeiouAEIO') else 'a'} {noun}"


def header(name: str, parameters: str = "...") -> str:
    """Return how the definition of a function begins.

    >>> header("upper", "texts"), header("<lambda>")
    ('def upper(texts)', 'def f(...)')
    """
    return f"def {name if name.isidentifier() else 'f'}({parameters})"


def name_of(function: Any) -> str:
    """Return what its user calls a function."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


def short(value: Any) -> str:
    """Return a value for a message: its beginning and its end, if it is long.

    >>> short("x" * 1000) == repr("x" * 1000)[:28] + "..." + "x" * 28 + "'"
    True
    >>> short([1, 2])
    '[1, 2]'
    """
    return _SHORT.repr(value)


_ALIKE = 0.62  # From 0 to 1: "wall" is like "walltime", "power" like "power_price" (0.63); "colour" not like "columns".


def closest(name: str, known: Iterable[str]) -> str:
    """Return what somebody may have meant, "" if it is like nothing that is known; neither case nor spaces matter.

    >>> closest("Priorty ", ["priority", "timeout"]), closest("colour", ["priority", "timeout"])
    ('priority', '')
    """
    plain = {str(each).strip().lower(): each for each in reversed(list(known))}
    found = difflib.get_close_matches(name.strip().lower(), plain, 1, _ALIKE)
    return plain[found[0]] if found else ""
