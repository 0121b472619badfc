"""The contract between a run and its engine: what each may ask of the other, and the files that calls take and make.

One contract test suite (ctxflow.testing.engines) runs against all engines.

Files travel where workers do not see this machine's disk. They are Parsl's `File` objects among the arguments, in
`inputs=` and `outputs=`, and where bash apps redirect their output to. What is named by a relative path has that path
in the call's folder too; all else gets one there. Parsl, which takes a second to import, is not imported for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ctxflow.errors import CtxflowError
from ctxflow.host.call_surroundings import STAGED
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.events import PERVASIVE, Event, TierSpec
from ctxflow.sites import Site
from ctxflow.sites.engine_kinds import Capabilities

if TYPE_CHECKING:
    from parsl.data_provider.files import File


@dataclasses.dataclass(frozen=True)
class ContextPayload:
    """What an engine needs to build a context on a worker.

    :ivar recipe: what the library process opens; empty for the plain library process.
    :ivar files: parameter name -> (path on this machine, digest of the content).
    :ivar timeout: seconds that building may take.
    :ivar memory: bytes that the library process may use.
    :ivar level: one of `events.LEVELS`. At "none" `Stage` brings the files anew, sharing none with other contexts
        or workers, and `Unload(files=True)` removes them; at other levels they stay, and the context may be loaded
        again without another `Stage`.
    """

    id: str
    name: str
    recipe: bytes
    files: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]
    timeout: float | None
    memory: int | None
    level: str = PERVASIVE


class Pickled:
    """A function or constants, pickled: a library process is sent each once.

    :ivar name: no other has it, or ever will, so that it can be forgotten.
    """

    __slots__ = ("__weakref__", "body", "name")

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.body = body


@dataclasses.dataclass(frozen=True, slots=True)
class CallPayload:
    """What an engine needs to run a batch.

    :ivar style: "batch" (the function gets lists, one result per item), "apply" (any arguments, one result) or "step"
        (the function makes chunks of sessions; the body is entries of host/call_results.py, and the library process
        has to be told the folder of the worker's cache where frozen states are, which `Carry` moves files between).
    :ivar function: None if it is in the body.
    :ivar insert: whether an "apply" function gets the built context as its first argument.
    :ivar body: the pickled inputs.
    :ivar files: those that are to be in the call's folder, and those that it makes there; only where workers have
        folders for calls.
    :ivar constants: the named arguments that the function gets besides, None if there are none.
    """

    style: str
    function: Pickled | None
    insert: bool
    timeout: float | None
    body: bytes
    files: CallFiles | None = None
    constants: Pickled | None = None

    def new_parts(self, known: Collection[str]) -> Sequence[Pickled]:
        """Return what a library process has to be sent before the call, of which it has `known`, by name."""
        return [part for part in (self.function, self.constants) if part is not None and part.name not in known]


@dataclasses.dataclass(frozen=True, slots=True)
class Payloads:
    """What goes with the commands of one `Engine.execute`: `Run` and `Step`, by attempt; others, by context."""

    calls: Mapping[int, CallPayload] = dataclasses.field(default_factory=dict)
    contexts: Mapping[str, ContextPayload] = dataclasses.field(default_factory=dict)


NO_PAYLOADS = Payloads()


class RunServices(Protocol):
    """What a run offers its engine."""

    @property
    def id(self) -> str:
        """The run's id."""

    @property
    def directory(self) -> str:
        """Where the run keeps its files."""

    def clock(self) -> float:
        """Return the seconds since the run began."""


class EngineFailed(CtxflowError):
    """Raised by `poll` when no work will get done, saying why, and what to do: all calls fail, also later ones."""


class LimitReached(EngineFailed):
    """A limit of GPU-hours or cost is reached, all workers were given back, and something is not answered."""

    exit_status = 4


class Engine(Protocol):
    """Carries out commands and reports events.

    `execute` may be called from any thread, also while another is in `poll`; the run never calls `execute`
    twice at a time.
    """

    capabilities: Capabilities
    """What it can do, and what the run therefore does for it."""

    def start(self, run: RunServices) -> None:
        """Get ready; workers come with `Acquire`."""

    def execute(self, commands: Sequence[Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands, in order, without waiting for them to take effect.

        :param payloads: what those of them need that build contexts and run calls.
        """

    def poll(self, timeout: float) -> list[Event]:
        """Return what happened; wait up to `timeout` seconds for something to.

        :raises EngineFailed: if no work will ever get done.
        """

    def forget(self, functions: Collection[str]) -> None:
        """Have workers keep these functions and constants no more, by name: no call will need them.

        Called as `execute` is. A call that was given before may still run, and be answered for nobody.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called from a finalizer, on a thread that is inside the engine."""

    def stop(self) -> None:
        """End all workers; nothing is left behind. What is called after it does nothing."""


class SiteEngine(Engine, Protocol):
    """An engine that a site can select by name: what an entry point in the group `ctxflow.engines` leads to.

    Its own keys, in the site file's table `[NAME]`, are checked by the class attribute `Options`, a model of pydantic's
    (see `ctxflow.sites.engine_kinds.EngineOptions`); without one it has none.
    """

    @classmethod
    def from_site(cls, site: Site) -> SiteEngine:
        """Make the engine of a site: of `site.options`, its own keys, and of those that are for all engines.

        :raises ValueError: if it cannot be made so, saying what to write.
        """

    def tiers(self) -> Sequence[TierSpec]:
        """Return the kinds of workers that it can have, one at least: what `Acquire` may name."""


@runtime_checkable
class Explains(Protocol):
    """An engine that knows why a tier has fewer workers than were asked for."""

    def reasons(self) -> Mapping[str, str]:
        """Return for each tier why it has fewer workers, a sentence; "" if it has them."""


@runtime_checkable
class KnowsJobs(Protocol):
    """An engine that knows which jobs its workers are, and where what they say is kept."""

    def job_of(self, worker: str) -> tuple[str | None, str]:
        """Return the job of a worker in its batch system, if any, and the path of its log, "" if there is none here."""


@runtime_checkable
class Bounded(Protocol):
    """An engine whose workers are bounded by more than what its tiers say."""

    def maxima(self) -> Mapping[str, int]:
        """Return for each tier how many workers there may be now, where that is less than the site says."""

    def limits(self) -> list[dict[str, Any]]:
        """Return what is used of each limit (see `ctxflow.factory.limits.standing`)."""


TAKEN = ("file", "http", "https")


@dataclasses.dataclass(frozen=True)
class Input:
    """A file that a call takes: its path in the call's folder, and its path here or its web address."""

    name: str
    source: str


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """A file that a call makes.

    :ivar name: its path in the call's folder.
    :ivar target: its path here.
    :ivar append: whether it is added to what is there.
    :ivar required: whether the call has to make it; else it is what a call prints, which comes also where it fails.
    """

    name: str
    target: str
    append: bool = False
    required: bool = True


@dataclasses.dataclass
class CallFiles:
    """All files of a call; `settled` once its outputs are here, by the first of several runs of it that ends."""

    inputs: tuple[Input, ...]
    outputs: tuple[OutputFile, ...] = ()
    settled: bool = False


def locate(file: File) -> File:
    """Say in a `File` where it is in a call's folder, and make its path here absolute.

    >>> from parsl import File
    >>> locate(File("data/in.txt")).local_path
    'data/in.txt'
    >>> locate(File("https://example.org/pages/one.html")).local_path
    '.staged/36942ba2/one.html'
    """
    if file.local_path is None and file.scheme == "file":
        file.local_path = _name(file.path)
        file.path = os.path.abspath(file.path)
    elif file.local_path is None:
        file.local_path = _apart(file.url, file.filename or "index")
    return file


def located(value: Any) -> Any:
    """Return a value, or if it is a `File` that Parsl has not staged, a copy that says where it is."""
    if _is_file(value) and value.local_path is None and value.scheme in TAKEN:
        return locate(value.cleancopy())
    return value


def call_files(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], CallFiles | None]:
    """Find the files of a call in its arguments, as Parsl does: among them, and in `inputs` and `outputs`.

    :raises ValueError: for an output that is no file here.
    :raises BadStdStreamFile: where what a bash app prints cannot be kept.
    :returns: the arguments with the files' places in the call's folder (`kwargs` is changed), and the files, if any.

    >>> from parsl import File
    >>> kwargs = {"outputs": [File("sum.txt")], "stdout": "/dev/null"}
    >>> args, files = call_files((File("in.txt"), 7), kwargs)
    >>> str(args[0]), str(kwargs["outputs"][0]), kwargs["stdout"]
    ('in.txt', 'sum.txt', '.staged/92f99794/null')
    >>> [(each.target.split("/")[-1], each.required, each.append) for each in files.outputs]
    [('sum.txt', True, False), ('null', False, True)]
    """
    outputs = list(_redirects(kwargs))
    args = tuple(map(located, args))
    for name, value in kwargs.items():
        in_lists = name in ("inputs", "outputs") and isinstance(value, (list, tuple))
        kwargs[name] = type(value)(map(located, value)) if in_lists and type(value) in (list, tuple) else located(value)
    outputs = [_output(file) for file in _listed(kwargs.get("outputs")) if _is_ours(file)] + outputs
    others = (value for name, value in kwargs.items() if name not in ("outputs", "stdout", "stderr"))
    taken = inputs_of((*args, *others, *_listed(kwargs.get("inputs"))))
    return args, CallFiles(taken, tuple(outputs)) if taken or outputs else None


def placed(items: Sequence[Any]) -> Sequence[Any]:
    """Return items, each a tuple of values, with the places of their files; the same object if they have none.

    >>> from parsl import File
    >>> [(file,)] = placed([(File("in.txt"),)])
    >>> file.local_path
    'in.txt'
    """
    if _FILES not in sys.modules or not any(_is_file(value) for item in items for value in item):
        return items
    return [tuple(map(located, item)) for item in items]


def inputs_of(values: Iterable[Any]) -> tuple[Input, ...]:
    """Return the inputs among values, each once."""
    files = filter(_is_ours, values)
    return tuple(dict.fromkeys(Input(each.local_path, _source(each)) for each in files))


_FILES = "parsl.data_provider.files"


def _is_file(value: Any) -> bool:
    module = sys.modules.get(_FILES)
    return module is not None and isinstance(value, module.File)


def _is_ours(value: Any) -> bool:
    """Return whether a file is to be in the call's folder; another staging provider may have put it elsewhere."""
    return _is_file(value) and value.scheme in TAKEN and not os.path.isabs(value.local_path or os.sep)


def _source(file: File) -> str:
    return str(file.path if file.scheme == "file" else file.url)


def _output(file: File, required: bool = True) -> OutputFile:
    if file.scheme != "file":
        raise ValueError(f"an output cannot be sent to {file.url}: give the path of a file here")
    return OutputFile(str(file.local_path), file.path, required=required)


def _redirects(kwargs: dict[str, Any]) -> Iterator[OutputFile]:
    """Have a bash app write its output in its folder, and say where that belongs."""
    for name in ("stdout", "stderr"):
        given = kwargs.get(name)
        if _is_file(given):
            file = kwargs[name] = located(given)
            _check_writable(file.path)
            yield _output(file, required=False)
            continue
        path, *mode = given if isinstance(given, tuple) and given else (given,)
        if isinstance(path, (str, os.PathLike)):
            place = _name(os.fspath(path))
            _check_writable(path)
            kwargs[name] = (place, *mode) if isinstance(given, tuple) else place
            append = str(mode[0] if mode else "a").startswith("a")  # Parsl's own default.
            yield OutputFile(place, os.path.abspath(path), append, required=False)


def _check_writable(path: str | os.PathLike[str]) -> None:
    """See that a bash app's output can be kept, before it runs; Parsl does so on workers that see this disk."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        from parsl.app.errors import BadStdStreamFile

        raise BadStdStreamFile(str(path)) from error


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _name(path: str) -> str:
    """Return where a file of this machine is in a call's folder: under the same relative path, if it has one within."""
    normal = os.path.normpath(path)
    if os.path.isabs(normal) or normal.split(os.sep)[0] == os.pardir:
        return _apart(os.path.abspath(path), os.path.basename(normal))
    return normal


def _apart(identity: str, name: str) -> str:
    return os.path.join(STAGED, hashlib.blake2b(identity.encode(), digest_size=4).hexdigest(), name)


def current_directory() -> str:
    """Return the directory where calls on this machine are to run.

    :raises CtxflowError: if it was removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise CtxflowError(
            f"calls run in the directory where the executor is started, which is not there any more ({error}): "
            "change to one that is"
        ) from error
