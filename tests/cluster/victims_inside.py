"""Runs on a host of the testbed, as root: end one of the processes that a worker with an engine consists of.

    python victims_inside.py WITHOUT list
    python victims_inside.py WITHOUT KIND SECONDS [SIGNAL]
    python victims_inside.py JOBS left SECONDS

KIND is one of `KINDS`, or "tree": all of a worker's processes. It writes as JSON when that was, whose worker it was,
and what of all that the victim had started, and of its sockets, is still there after so many seconds; or null if there
is no engine here. With "list", the workers that have one, and their jobs. WITHOUT names workers that do not count any
more, with commas between. With "left": when nothing was left of any worker, and what still is after so many seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

KINDS = ("server", "warden", "library", "host", "vine_worker", "wrapper")


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _variable(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
            if each.startswith(f"{name}="):
                return each.partition("=")[2]
    return ""


def _status(pid: int) -> tuple[int, str] | None:
    """A process's parent, and when it began; None if it has ended."""
    with contextlib.suppress(OSError):
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else (int(parent), rest[17])
    return None


def _there() -> dict[int, tuple[int, str]]:
    return {pid: seen for name in os.listdir("/proc") if name.isdigit() and (seen := _status(pid := int(name)))}


def _engines() -> list[int]:
    return sorted(pid for pid in _there() if os.path.basename(*_words(pid)[:1] or [""]) == "llama-server")


def _victim(server: int, kind: str) -> int:
    """The process of a kind above a server."""
    parent = {pid: each for pid, (each, _) in _there().items()}
    chain = [server]
    while parent.get(chain[-1], 0) > 1:
        chain.append(parent[chain[-1]])
    if kind in KINDS[:4]:
        return chain[KINDS.index(kind)]
    worker = next(
        at for at, pid in enumerate(chain) if _words(pid)[0].endswith("vine_worker") and os.getsid(pid) == pid
    )
    return chain[worker + (kind == "wrapper")]


def _tree(root: int) -> dict[int, str]:
    """A process and all that descend from it, and when each began."""
    there = _there()
    found = [root]
    for each in found:
        found += [pid for pid, (parent, _) in there.items() if parent == each]
    return {pid: there[pid][1] for pid in found if pid in there}


def _sockets(pids: dict[int, str]) -> set[str]:
    """The paths of these processes' sockets."""
    names = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("/"):
            names[f"socket:[{fields[6]}]"] = fields[7]
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for each in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(each.path))
    return {names[each] for each in found & names.keys()}


def _left(jobs: list[str]) -> list[str]:
    """All that is here of runs, and of these batch jobs: processes, shared memory, sockets."""
    marks = ("vine_worker", "ctxflow.pyz", "ctxflow.host", "llama-server", "warden.py")
    found = []
    for pid in _there():
        words, job = _words(pid), _variable(pid, "CTXFLOW_JOB")
        if pid != os.getpid() and (job in jobs if job else any(m in w for m in marks for w in words[:5])):
            found.append(f"{pid} {' '.join(words)[:200]}")
    for top in ("/tmp", "/scratch", "/var/lib/condor/execute"):
        for folder, _, files in os.walk(top):
            found += [path for each in files if stat.S_ISSOCK(os.lstat(path := os.path.join(folder, each)).st_mode)]
    return found + os.listdir("/dev/shm")


def _until_none(jobs: list[str], seconds: float) -> object:
    until = time.time() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):
            left = _left(jobs)
            if not left or time.time() > until:
                return {"time": time.time(), "left": left}
        time.sleep(0.02)


def main(names: list[str], kind: str, seconds: float = 5.0, number: str = "SIGKILL") -> object:
    if kind == "left":
        return _until_none(names, seconds)
    servers = [pid for pid in _engines() if _variable(pid, "CTXFLOW_WORKER_NAME") not in names]
    if kind == "list":
        return sorted({(_variable(pid, "CTXFLOW_WORKER_NAME"), _variable(pid, "CTXFLOW_JOB")) for pid in servers})
    if not servers:
        return None
    server = servers[0]
    job = _variable(server, "CTXFLOW_JOB")
    told = {"worker": _variable(server, "CTXFLOW_WORKER_NAME"), "job": job}
    victim = _victim(server, "wrapper" if kind == "tree" else kind)
    told["words"] = " ".join(_words(victim))[:200]
    tree, shm = _tree(victim), set(os.listdir("/dev/shm"))
    sockets = _sockets(tree)
    now = time.time()
    for pid in tree if kind == "tree" else [victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, number))
    left: list[str] = []
    gone = None
    while time.time() < now + seconds and gone is None:
        alive = {pid for pid, (_, began) in _there().items() if tree.get(pid) == began}
        left = [f"{pid} {' '.join(_words(pid))[:200]}" for pid in alive]
        left += [path for path in sockets if os.path.exists(path)]
        left += sorted(set(os.listdir("/dev/shm")) - shm)
        gone = None if left else time.time() - now
        time.sleep(0.02)
    return {**told, "time": now, "killed": len(tree), "sockets": len(sockets), "gone": gone, "left": left}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1].split(","), sys.argv[2], *map(float, sys.argv[3:4]), *sys.argv[4:])))
