"""A /dev/shm of a library process's own: what engines leave there when they are killed goes with their last process.

The segments of a killed process stay in /dev/shm until somebody removes them, 400 MB for a real engine. In a mount
namespace of its own, they live as long as a process that could use them. Where the machine refuses that, shm_leftovers
does what it can (docs/decisions/shared-memory.md).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping

FOLDER = "/dev/shm"
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_RECURSIVE_SLAVE = 0x4000 | 0x80000
_NO_DEVICES_NOR_SETUID = 0x4 | 0x2
_SOURCE = b"ctxflow"  # What the kernel says is mounted.
_LINKS = "ctxflow-files"
_OF_LINKS = r"\bNCCL\b|\bibv_|(?i:infiniband)|(?i:memlock)|\bNVSHMEM\b|\bUCX\b"
_MPS = "CUDA_MPS_PIPE_DIRECTORY"  # Whose clients and server share memory.


def wanted(environment: Mapping[str, str], paths: Iterable[str]) -> bool:
    """Return whether a library process can do without the machine's.

    :param paths: what it needs.

    >>> wanted({}, ["/data/weights"]), wanted({}, ["/dev/shm/weights"])
    (True, False)
    """
    if os.path.isdir(environment.get(_MPS, "/tmp/nvidia-mps")):
        return False
    return not any(os.path.realpath(path).startswith(FOLDER) for path in paths if path)


def enter() -> bool:
    """Have one from now on, for this process and those that it starts; False if that is refused: then nothing changed.

    Without the right to mount, this process gets a user namespace, in which it is whoever it was before; but that needs
    it to have a single thread still, and programs that change their user, such as sudo, do not work in it.
    """
    if _tried(_NEW_MOUNTS):
        return True
    alone = len(os.listdir("/proc/self/task")) == 1
    # Half of it done, it could not be undone: a child tries first.
    return alone and _tried_by_child(_NEW_MOUNTS | _NEW_USERS) and _tried(_NEW_MOUNTS | _NEW_USERS)


def entered() -> bool:
    """Return whether this process has a /dev/shm of its own."""
    try:
        with open("/proc/self/mountinfo", "rb") as mounts:
            there = [line.split() for line in mounts if line.split()[4] == FOLDER.encode()]
    except (OSError, IndexError):
        return False
    return bool(there) and there[-1][-3:-1] == [b"tmpfs", _SOURCE]


def advice(pid: int, said: str) -> str:
    """Return what to try, to be put behind an error, where a user namespace may be in the way of a process; else "".

    Links between GPUs and machines (NCCL, InfiniBand) lock memory and open devices by rights of the machine's users.

    :param pid: the process; "" is returned for one in this process's user namespace.
    :param said: the error, and what the process printed.
    """
    if not re.search(_OF_LINKS, said):
        return ""
    try:
        if os.readlink(f"/proc/{pid}/ns/user") == os.readlink("/proc/self/ns/user"):
            return ""
    except OSError:  # It is gone.
        return ""
    return (
        "; its process has a user namespace, for a /dev/shm of its own, in which NCCL and InfiniBand may fail: give "
        'the context env={"CTXFLOW_PRIVATE_SHM": "0"}'
    )


def one_path(path: str) -> str:
    """Return a staged file's or folder's name that is the same on all workers, whose caches are at different places.

    Engines whose caches are keyed by a model's path find what another worker's made. It is a link in this process's own
    /dev/shm: no other process can have made it, nor is it there when these have ended. Without such a /dev/shm, and of
    what is not in a worker's cache, it is the path as it is.

    :param path: in the cache, which is DIGEST/NAME there (local_files.py).

    >>> one_path("/data/model")
    '/data/model'
    """
    folder, name = os.path.split(os.path.realpath(path))
    digest = os.path.basename(folder)
    if not re.fullmatch("[0-9a-f]{32,64}", digest) or not entered():
        return path
    link = os.path.join(FOLDER, _LINKS, digest, name)
    try:
        os.makedirs(os.path.dirname(link), 0o700, exist_ok=True)
        if not os.path.lexists(link):
            os.symlink(os.path.join(folder, name), link)
        return link if os.path.samefile(link, path) else path
    except OSError:
        return path


def _tried_by_child(what: int) -> bool:
    child = os.fork()
    if not child:
        done = False
        try:
            done = _tried(what)
        finally:
            os._exit(0 if done else 1)
    return os.waitpid(child, 0)[1] == 0


def _tried(what: int) -> bool:
    """Return whether a namespace can be had, with an empty /dev/shm as large as the machine's."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        size = os.statvfs(FOLDER)
        user, group = os.getuid(), os.getgid()
        if libc.unshare(what):
            return False
        if what & _NEW_USERS:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        options = f"mode=1777,size={size.f_blocks * size.f_frsize}".encode()
    except OSError:
        return False
    # What is mounted on the machine later is seen here too, and nothing of this there.
    if libc.mount(b"none", b"/", None, _RECURSIVE_SLAVE, None):
        return False
    return not libc.mount(_SOURCE, FOLDER.encode(), b"tmpfs", _NO_DEVICES_NOR_SETUID, options)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
