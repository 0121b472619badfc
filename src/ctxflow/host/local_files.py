"""Files on this machine's disk: folders that last as long as their owner, and a worker's cache of files by content.

An owner holds a lock on its folder, which the kernel releases with the last process that has it open: no clock and no
process id says who lives. A file in the cache is hard-linked where the disk allows, complete or not there at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

PREFIX = "ctxflow-"
OF_LIBRARY = "CTXFLOW_LIBRARY_SCRATCH"
"""The variable that tells a library process its directory, which is removed when that has ended."""
_MARK = ".ctxflow-owned"
_LONGEST_SOCKET = 107  # Bytes of a UNIX socket's path.
# What asks a whole group of processes to end is not meant for it.
_REMOVE = 'for i in 1 2 3 4 5; do rm -rf -- "$@" && exit; sleep 1; done'
_SAYS = """\
A run of ctxflow, or a worker of one, keeps its files here, and has a lock on this folder while it lives. If nobody has,
it was killed: the next run on this machine removes the folder, and so does `ctxflow clean`.
"""


class Scratch:
    """A folder of one's own, which nobody else may enter.

    :param base: where it is made; by default the temporary directory.
    :raises OSError: if it cannot be made.

    >>> scratch = Scratch()
    >>> os.path.isdir(scratch.path), scratch.path in abandoned()
    (True, False)
    >>> scratch.close()
    >>> os.path.exists(scratch.path)
    False
    """

    def __init__(self, base: str | None = None) -> None:
        import tempfile  # Here, as below: a context host starts the sooner without it.

        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # There are disks without locks; then nobody else removes it.
            fcntl.flock(self._folder, fcntl.LOCK_EX)
            # Only what is marked is ever removed, and it is marked with the lock: nobody takes a new one for abandoned.
            with open(os.path.join(self.path, _MARK), "w") as mark:
                mark.write(_SAYS)

    def short_name(self) -> str:
        """Return another name of it, short enough for sockets in it: for this user, while this process has it.

        >>> scratch = Scratch()
        >>> os.path.samefile(scratch.short_name(), scratch.path)
        True
        >>> scratch.close()
        """
        return f"/proc/{os.getpid()}/fd/{self._folder}"

    def close(self) -> None:
        """Remove it; again is no error."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def scratch_for_sockets(name_bytes: int) -> Scratch:
    """Make a folder in which sockets have short enough names, in that of this library process if that will do.

    :param name_bytes: of the longest name of a socket in it.
    :raises OSError: if there is none, or it cannot be made.
    """
    for base in (os.environ.get(OF_LIBRARY), None, "/tmp"):
        if base == "" or (base is not None and not os.path.isdir(base)):
            continue
        scratch = Scratch(base)
        if len(os.fsencode(scratch.path)) + 1 + name_bytes <= _LONGEST_SOCKET:
            return scratch
        scratch.close()
    raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket: set TMPDIR to a shorter one", scratch.path)


def start_guard(then: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a shell that does something with some words when its input ends, as it does when this process is killed.

    :param then: the shell's commands, for which the words are "$@".
    :param env: its environment; by default this process's.
    """
    # What asks a whole group of processes to end is not meant for it. Nothing comes but the end of its input.
    script = f'trap "" HUP INT QUIT TERM; read -r line; {then}'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "ctxflow-guard", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=env,
        start_new_session=True,
    )


class Guard:
    """Removes files and folders when it is closed, or when this process ends in any way, also if it is killed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._process = start_guard(_REMOVE, [os.path.abspath(path) for path in paths])

    def close(self) -> None:
        """Remove them; again is no error."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def abandoned(base: str | None = None) -> list[str]:
    """Return the folders of this user in a temporary directory whose owners were killed."""
    import tempfile

    base = base or tempfile.gettempdir()
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(base)):
            path = os.path.join(base, name)
            if name.startswith(PREFIX) and (folder := _taken(path)) is not None:
                os.close(folder)
                found.append(path)
    return found


def sweep(base: str | None = None) -> list[str]:
    """Remove the folders whose owners were killed, and return their paths."""
    return [path for path in abandoned(base) if remove_abandoned(path)]


def remove_abandoned(path: str) -> bool:
    """Remove one of them; return whether it is gone."""
    folder = _taken(path)  # Held meanwhile, so that of two who remove it only one does.
    if folder is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(folder)
    return not os.path.exists(path)


def _taken(path: str) -> int | None:
    """Return an abandoned folder's descriptor, with its lock; None if it is not one."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        found = os.fstat(folder)
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(_MARK, dir_fd=folder, follow_symlinks=False)
            return folder
    os.close(folder)
    return None


_FICLONE = 0x40049409
_COPIED_BYTES, _COPIED_IN_ALL = 4 << 20, 256 << 20  # Of a file, and of all files of a folder: more would take time.


def cached(digest: str, source: str, cache: str) -> str:
    """Return where a file or folder of that digest is in the cache (it keeps its name, which loaders look at).

    >>> cached("ab12", "/data/model.bin", "/cache")
    '/cache/ab12/model.bin'
    """
    return os.path.join(cache, digest, os.path.basename(os.path.normpath(source)))


def stage(source: str, digest: str, cache: str, link: bool = True) -> str:
    """Put a file or folder into the cache, unless it is there, and return its place.

    What is written into it changes the source where that is linked to, and only there: files of up to 4 MB are copied,
    and all where a copy costs no room (Btrfs, XFS). Of processes that stage the same at once, the first to finish wins.

    :param link: whether a hard link will do for what is large, where the disk allows one; else it is copied.
    :raises OSError: if it cannot be read or the cache's disk is full; nothing half-made is left.
    """
    bring = _Apart() if link else shutil.copyfile
    return _put(lambda copy: _copy(source, copy, bring), digest, source, cache)


def stage_as(path: str, digest: str, source: str, cache: str) -> str:
    """Put what came from elsewhere, and is at `path` now, into the cache; it keeps its name in `source`."""
    return _put(lambda copy: _copy(path, copy, link_or_copy), digest, source, cache)


def link(path: str, digest: str, source: str, cache: str) -> str:
    """Put a file or folder into the cache by hard links to `path`, its place in another cache on this machine."""
    return _put(lambda copy: _copy(path, copy, _link), digest, source, cache)


def unpack(archive: str, digest: str, source: str, cache: str) -> str:
    """Put a folder into the cache that comes as a tar archive of its content; raise `TarError` if it is none."""
    return _put(lambda copy: extract(archive, copy), digest, source, cache)


def extract(archive: str, folder: str) -> None:
    """Make a folder of a tar archive of its content; raise `TarError` if it is none."""
    import tarfile  # Here, with what opens it: few workers need them, and they are much to import.

    from ctxflow.environments.opening import extract_inside

    os.mkdir(folder)
    with tarfile.open(archive) as tar:
        extract_inside(tar, folder)


def plain_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the plain files of a folder, always in the same order."""
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(at, name)
            its = os.lstat(path)
            if stat.S_ISREG(its.st_mode):
                yield path, its


def copy_plain(source: str, target: str) -> None:
    """Copy the plain files of a folder, and its folders, for this user alone."""
    os.makedirs(target, 0o700, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            to = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                copy_plain(entry.path, to)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, to, follow_symlinks=False)
                os.chmod(to, 0o700 if entry.stat(follow_symlinks=False).st_mode & 0o100 else 0o600)


def present(path: str, digest: str, source: str, cache: str, in_place: bool) -> str:
    """Put into the cache what the host's cache has at `path`: folders and small files become the worker's own.

    Large files are clones where that costs no room, else hard links, which are read-only; where these are not possible
    they are links to the very files.

    :param in_place: whether such links will do; else they are copied.
    """
    return _put(lambda copy: _copy(path, copy, _Presented(in_place)), digest, source, cache)


def forget(digest: str, cache: str) -> None:
    """Remove from the cache what has a digest; who uses it already is not disturbed."""
    import tempfile

    with contextlib.suppress(FileNotFoundError):
        gone = tempfile.mkdtemp(prefix=".staging-", dir=cache)
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(cache, digest), gone)
        shutil.rmtree(gone, ignore_errors=True)


def _put(make: Callable[[str], None], digest: str, source: str, cache: str) -> str:
    """Make something beside its place in the cache, and move it there when it is complete."""
    place = cached(digest, source, cache)
    if os.path.exists(place):
        return place
    import tempfile

    os.makedirs(cache, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".staging-", dir=cache)
    try:
        copy = os.path.join(work, os.path.basename(place))
        make(copy)
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


def _copy(source: str, copy: str, copy_file: Callable[[str, str], object]) -> None:
    if os.path.isdir(source):
        shutil.copytree(source, copy, copy_function=copy_file)
    else:
        copy_file(source, copy)


class _Apart:
    """Brings files, each as far apart from its source as costs little time and room."""

    def __init__(self) -> None:
        self._clones = True
        self._left = _COPIED_IN_ALL

    def __call__(self, source: str, target: str) -> str:
        """Bring one."""
        if self._clones:
            self._clones = _clone(source, target)
            if self._clones:
                return target
        size = os.stat(source).st_size
        if size <= min(_COPIED_BYTES, self._left):
            self._left -= size
            return shutil.copy(source, target)
        return self._bring_large(source, target)

    def _bring_large(self, source: str, target: str) -> str:
        return link_or_copy(source, target)


class _Presented(_Apart):
    """Brings files of the host's cache, which are read-only, and no links."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self._in_place = in_place

    def __call__(self, source: str, target: str) -> str:
        """Bring one; a copy of its own may be written to."""
        super().__call__(source, target)
        found = os.lstat(target)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            os.chmod(target, found.st_mode | stat.S_IWUSR)
        return target

    def _bring_large(self, source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:  # Another disk, or one that has no hard links.
            if not self._in_place:
                return shutil.copy(source, target)
            os.symlink(source, target)
        return target


def _clone(source: str, target: str) -> bool:
    """Make a copy that shares its blocks until one of both is written to; False where the disk has no such."""
    with open(source, "rb") as given:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.fstat(given.fileno()).st_mode & 0o777)
        try:
            fcntl.ioctl(copy, _FICLONE, given.fileno())
        except OSError:
            os.unlink(target)
            return False
        finally:
            os.close(copy)
    return True


def _link(source: str, target: str) -> str:
    os.link(os.path.realpath(source), target)
    return target


def link_or_copy(source: str, target: str) -> str:
    """Hard-link a file, or copy it where that is not possible; return its place."""
    try:
        _link(source, target)
    except OSError:  # Another disk, or one that has no hard links.
        shutil.copyfile(source, target)
    return target


def staging_message(error: Exception, cache: str) -> str:
    """Return what went wrong in bringing files to the cache, and what to do."""
    first = error.args[0][0] if isinstance(error, shutil.Error) and error.args and error.args[0] else None
    if first is not None:  # A folder's: (source, target, why) of each file that failed.
        source, _, reason = first
    else:
        source, reason = getattr(error, "filename", None) or "a file", getattr(error, "strerror", None) or error
    return (
        f"{reason} while staging {source} to {cache}: see that the file can be read, and that there is "
        "room, or put scratch= of the site on another disk"
    )


def clear(scratch: str) -> None:
    """Remove a worker's directory, or a part of it."""
    shutil.rmtree(scratch, ignore_errors=True)
