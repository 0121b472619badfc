"""The files that calls take and make where workers do not see this machine's disk, by the calls' arguments.

They are Parsl's `File` objects among the arguments, in `inputs=` and `outputs=`, and where bash apps redirect their
output to. What is named by a relative path has that path in the call's folder too; all else gets one there. Without
Parsl, which takes a second to import, there are none.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.host.call_surroundings import STAGED

if TYPE_CHECKING:
    from parsl.data_provider.files import File


from ctxflow.executors.contract import CallFiles, Input, OutputFile

TAKEN = ("file", "http", "https")


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
