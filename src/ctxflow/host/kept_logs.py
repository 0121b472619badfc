"""Logs of what was started last: a run that lives long, and loses many processes, does not keep one for each."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection


class KeptLogs:
    """Files, or folders of them, of which so many are kept, and those of what lives.

    >>> kept = KeptLogs(2)
    >>> kept.add("/run/1", ()), kept.add("/run/2", ()), kept.add("/run/3", ["/run/1"]), kept.paths
    (None, None, None, ['/run/1', '/run/3'])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.paths: list[str] = []

    def add(self, path: str, living: Collection[str]) -> None:
        """Keep another, and remove the oldest of what has ended, if there are too many.

        :param living: the logs of what has not ended.
        """
        self.paths.append(path)
        ended = [each for each in self.paths[:-1] if each not in living]
        for each in ended[: max(0, len(self.paths) - self._most)]:
            self.paths.remove(each)
            with contextlib.suppress(OSError):
                shutil.rmtree(each) if os.path.isdir(each) else os.unlink(each)
