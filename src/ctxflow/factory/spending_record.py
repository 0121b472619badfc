"""What a user's factories have lent so far, over all runs: a file of each machine's factory of a site, in the home.

The user alone can read and write it. What does not live here: counting (spending.py).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import urllib.parse

from ctxflow.errors import CtxflowError
from ctxflow.factory.spending import Spent, total
from ctxflow.safe_files import make_own_folder, read_own, write_private


def spending_file(site: str, host: str | None = None) -> str:
    """Where the factory of a site on a machine (by default this one) keeps its record."""
    name = f"spent-{urllib.parse.quote(site, safe='')}@{host or socket.gethostname()}.json"
    return os.path.join(os.path.expanduser("~"), ".ctxflow", name)


class SpendingRecord:
    """The record of one factory's user; homes may be shared, so that other machines' count too.

    :param site: the site's name.
    :raises CtxflowError: if the record cannot be read: nobody knows then what was used.
    """

    def __init__(self, site: str) -> None:
        self.path = spending_file(site)
        self._others = os.path.join(glob.escape(os.path.dirname(self.path)), f"{glob.escape(_stem(self.path))}@*.json")
        self._before = _read(self.path)
        self._written = self._before
        self._beside = self._read_others()

    def total(self, now: Spent) -> Spent:
        """All that was used, with what this factory has lent since it began."""
        return self._before + self._beside + now

    def write(self, now: Spent) -> None:
        """Keep it, if it has changed; and see what other machines have kept.

        :raises OSError: if it cannot be written.
        """
        with contextlib.suppress(CtxflowError):  # One that cannot be read now counts as it did.
            self._beside = self._read_others()
        spent = self._before + now
        if spent == self._written:
            return
        make_own_folder(os.path.dirname(self.path))
        write_private(f"{self.path}.new", json.dumps({"gpu_hours": spent.gpu_hours, "cost": spent.cost}) + "\n")
        os.replace(f"{self.path}.new", self.path)
        self._written = spent

    def _read_others(self) -> Spent:
        return total(_read(path) for path in glob.glob(self._others) if path != self.path)


def _stem(path: str) -> str:
    return path.rpartition("@")[0].rpartition("/")[2]


def _read(path: str) -> Spent:
    try:
        found = json.loads(read_own(path))
        return Spent(float(found["gpu_hours"]), float(found["cost"]))
    except FileNotFoundError:
        return Spent()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CtxflowError(
            f"what was used of this user's limits cannot be read from {path} ({error}): mend it, or remove it to count "
            "from nothing"
        ) from None
