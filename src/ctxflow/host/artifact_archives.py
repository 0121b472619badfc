"""Artifacts as one file, in which they travel to other hosts: the same content is the same bytes."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping

from ctxflow.files import digest_now
from ctxflow.host.local_files import OF_LIBRARY, copy_plain, extract, plain_files


def write_archive(folder: str, path: str) -> None:
    """Pack the plain files of a folder, with their names and whether they are programs.

    >>> with tempfile.TemporaryDirectory() as base:
    ...     os.makedirs(os.path.join(base, "made", "inductor"))
    ...     with open(os.path.join(base, "made", "inductor", "kernel"), "w") as file:
    ...         _ = file.write("x")
    ...     archive, place = os.path.join(base, "archive"), os.path.join(base, "next")
    ...     write_archive(os.path.join(base, "made"), archive)
    ...     take_archive(archive, digest_now(archive), {"inductor": place}), os.listdir(place)
    (True, ['kernel'])
    """
    with tarfile.open(path, "w") as archive:
        for source, its in plain_files(folder):
            member = tarfile.TarInfo(os.path.relpath(source, folder))
            member.size, member.mode = its.st_size, 0o700 if its.st_mode & 0o100 else 0o600
            with open(source, "rb") as file:
                archive.addfile(member, file)


def take_archive(path: str, digest: str, places: Mapping[str, str]) -> bool:
    """Copy an archive's folders to their places, by their names; return whether it has any of them.

    :param digest: that of the archive: it is programs that will be run.
    :raises ValueError: if it does not have that digest, or holds anything but plain files.
    :raises OSError: if it cannot be read, or a place cannot be written.
    """
    if digest_now(path) != digest:
        raise ValueError("it does not have its digest")
    try:
        return _taken(path, places)
    except tarfile.TarError as error:
        raise ValueError(str(error)) from None


def _taken(path: str, places: Mapping[str, str]) -> bool:
    with tarfile.open(path) as archive:
        if not all(member.isfile() for member in archive):
            raise ValueError("it holds more than plain files")
    work = tempfile.mkdtemp(dir=os.environ.get(OF_LIBRARY))
    try:
        whole = os.path.join(work, "whole")
        extract(path, whole)
        found = [name for name in places if os.path.isdir(os.path.join(whole, name))]
        for name in found:
            copy_plain(os.path.join(whole, name), places[name])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return bool(found)
