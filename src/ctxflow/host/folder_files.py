"""The files of a call in a folder of its own: brought there before it, taken from there after it.

Inputs are copies, so that the call may do with them what it likes: of files that lie in the folder of the message that
brought the call, or of what is at a web address. Outputs go into that folder, from where they are sent to the driver.
What does not live here: which files a call has (executors/call_files.py), and how they get from machine to machine
(executors/taskvine/attachments.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

STAGED = ".staged"
"""The folder, in a call's, of files that have no place of their own in it."""
_CONNECT_SECONDS = 60.0  # How long a web server may keep silent.


class FolderFiles:
    """The files of one call.

    :param inputs: each a name in the call's folder and where it comes from (a name in `sandbox`, or a web address).
    :param outputs: each a name in the call's folder, one in `sandbox`, and whether the call must make it.
    :param folder: the call's.
    """

    def __init__(
        self, inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str, bool]], sandbox: str, folder: str
    ) -> None:
        self._inputs, self._outputs, self._sandbox = inputs, outputs, sandbox
        self._names = [name for name, _ in self._inputs] + [name for name, _, _ in self._outputs]
        self._folder = folder

    def bring(self) -> None:
        """Put the inputs, and the folders of the outputs, where the call will look for them.

        :raises OSError: if one cannot be had, with what to do.
        """
        for name in self._names:
            os.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
        for name, source in self._inputs:
            if "://" in source:
                _download(source, self._path(name))
            else:
                shutil.copy(os.path.join(self._sandbox, source), self._path(name))

    def take(self, failed: bool) -> dict[str, int]:
        """Take the outputs away; gives the size of each that there is, by its name in `sandbox`.

        :param failed: whether the call has failed: then only what it printed is taken.
        :raises OSError: if one is missing that the call had to make.
        """
        sizes = {}
        for name, target, required in self._outputs:
            if failed and required:
                continue
            path = self._path(name)
            if failed and not os.path.isfile(path):
                continue
            if os.path.isdir(path):
                raise IsADirectoryError(
                    f"the call made a folder of its output {name}: have it make one file, an archive"
                )
            if os.path.exists(path):
                sizes[target] = os.path.getsize(path)
                take = shutil.copy if os.path.islink(path) else shutil.move
                take(path, os.path.join(self._sandbox, target))
            elif required:
                raise FileNotFoundError(f"the call ended without making its output {name}: it has to write it there")
        return sizes

    @property
    def known(self) -> set[str]:
        """What of the call's folder is its files', and no rest of it."""
        return {name.split(os.sep)[0] for name in self._names}

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def complete(sandbox: str, outputs: Sequence[str]) -> None:
    """See that there is a file for each output, be it empty: without one, TaskVine would give the worker up."""
    for name in outputs:
        with contextlib.suppress(OSError), open(os.path.join(sandbox, name), "ab"):
            pass


def _download(address: str, path: str) -> None:
    import urllib.error  # Which take a fifth of the time in which a library process starts.
    import urllib.request

    try:
        with urllib.request.urlopen(address, timeout=_CONNECT_SECONDS) as answer, open(path, "wb") as file:
            shutil.copyfileobj(answer, file)
    except urllib.error.URLError as error:  # Some cannot be pickled.
        reason = getattr(error, "reason", error)
        raise OSError(
            f"the worker cannot have {address} ({reason}): see that it is there, and seen from workers"
        ) from None
