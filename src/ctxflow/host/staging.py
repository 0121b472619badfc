"""A worker's cache of files: by content, hard-linked where the disk allows, complete or not there at all.

What does not live here: which files a context needs, and sending them between workers.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile


def cached(digest: str, source: str, cache: str) -> str:
    """Where a file or folder of that digest is in the cache (it keeps its name, which loaders look at).

    >>> cached("ab12", "/data/model.bin", "/cache")
    '/cache/ab12/model.bin'
    """
    return os.path.join(cache, digest, os.path.basename(os.path.normpath(source)))


def stage(source: str, digest: str, cache: str, link: bool = True) -> str:
    """Put a file or folder into the cache, unless it is there, and give its place.

    :param link: whether a hard link will do, where the disk allows one; else it is copied.

    Several processes may stage the same at once: each makes its own copy, and the first to finish wins.

    :raises OSError: if it cannot be read or the cache's disk is full; nothing half-made is left.
    """
    place = cached(digest, source, cache)
    if os.path.exists(place):
        return place
    bring = _link_or_copy if link else shutil.copyfile
    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".staging-", dir=cache)
    try:
        copy = os.path.join(work, os.path.basename(place))
        if os.path.isdir(source):
            shutil.copytree(source, copy, copy_function=bring)
        else:
            bring(source, copy)
        # The folder of the digest may be there already, with the same content under another name.
        os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            os.rename(copy, place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # Another disk, or one that has no hard links.
        shutil.copyfile(source, target)
    return target
