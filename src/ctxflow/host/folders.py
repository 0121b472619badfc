"""Where a library process runs its calls: in one directory for all, or in a folder for each.

What does not live here: which of the two (the engines say it with `load`), and running the calls (library.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Set


class InPlace:
    """All calls run in one directory, which is the user's: nothing in it is removed.

    :param directory: an absolute path without symbolic links, as `os.getcwd` gives it.
    """

    def __init__(self, directory: str) -> None:
        self.folder = directory

    def enter(self) -> None:
        """Begin a call, or a context's build, there, wherever the one before has gone.

        :raises OSError: if the directory cannot be entered, with what to do.
        """
        try:
            if os.getcwd() == self.folder:
                return
        except OSError:  # It was removed; perhaps another of its name is there by now.
            pass
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"calls run in the directory where the executor was started, {self.folder}, and that cannot be "
                f"entered any more ({error.strerror}): put it back, or start the executor in one that stays",
            ) from None

    def rest(self, known: Set[str]) -> list[str]:
        """What a call has left that will be removed: nothing."""
        return []

    def hint(self, error: BaseException) -> str:
        """What is to be said beside an error of a call or a build: nothing, paths are those of the user's programs."""
        return ""

    def leave(self) -> None:
        """End a call."""


class FolderEach:
    """Each call has a folder of its own, which is removed after it; one that is left empty serves the next.

    :param scratch: a directory of the library process's own.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = os.path.realpath(scratch)
        self.folder = ""
        self._made = 0

    def enter(self) -> None:
        """Begin a call.

        :raises OSError: if there is no room for its folder, with what to do.
        """
        if self.folder:
            return
        self._made += 1
        folder = os.path.join(self._scratch, f"call-{self._made}")
        try:
            os.makedirs(folder)
            os.chdir(folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the call got no directory to run in ({error}): make room there, or put scratch= of the site on "
                "another disk",
            ) from None
        self.folder = folder

    def rest(self, known: Set[str]) -> list[str]:
        """What a call has left in its folder, which will be removed; a folder's name ends in a slash.

        :param known: names of what may go without a word.
        """
        with contextlib.suppress(OSError), os.scandir(self.folder) as found:
            return sorted(entry.name + "/" * entry.is_dir() for entry in found if entry.name not in known)
        return []

    def hint(self, error: BaseException) -> str:
        """What is to be said beside an error of a call or a build: why a file with a relative path is not here."""
        path = getattr(error, "filename", None)
        if not isinstance(error, FileNotFoundError) or not isinstance(path, str) or os.path.isabs(path):
            return ""
        return (
            f"{path} was looked for in an empty folder on a worker: name it in inputs=[File(...)] of the call, or in "
            "files= of the context, and it is brought there (docs/where-your-code-runs.md)"
        )

    def leave(self) -> None:
        """End a call."""
        try:
            clean = os.getcwd() == self.folder and not os.listdir(self.folder)
        except OSError:
            clean = False
        if not clean:
            # The call may have removed even the directory above.
            with contextlib.suppress(OSError):
                os.makedirs(self._scratch, exist_ok=True)
                os.chdir(self._scratch)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""
