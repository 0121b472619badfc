"""The line that explains why a worker ended, among all that it wrote, and what to do about it. Pure."""

from __future__ import annotations

import re

_NOISE = re.compile(r"(creating|deleting) workspace|vine_worker: using \d+ cores|notice: stopping: could not connect")
_COMINGS = re.compile(r"^(dis)?connected (to|from) manager ")
_RESOLVE = re.compile(r"couldn't resolve hostname ([\w.-]+?)(?=couldn't resolve|\d{4}/\d\d/\d\d |$)", re.MULTILINE)
_CONNECT = re.compile(r"couldn't connect to (\S+?): (.+)")
_DISK = re.compile(r"less than the promised disk space .*?(\d+) < (\d+) MB")


def explaining_line(words: str, nothing: str = "no output") -> str:
    """Return it, or the last line that says something.

    :param words: the last lines that a worker wrote.
    :param nothing: what to return where none says anything.

    >>> print(explaining_line("has less than the promised disk space (--disk > disk total) 70000 < 3072 MB"))
    its scratch directory has 3.1 GB free, and disk_gb promises 70: write less, or have TMPDIR name a larger disk
    >>> explaining_line("vine_worker: creating workspace /tmp/x\\nno room\\nvine_worker: deleting workspace /tmp/x")
    'no room'
    """
    if found := _DISK.search(words):
        promised, there = (int(number) / 1000 for number in found.groups())
        return (
            f"its scratch directory has {there:.1f} GB free, and disk_gb promises {promised:g}: write less, or have "
            "TMPDIR name a larger disk"
        )
    if found := _RESOLVE.search(words):
        return f"it cannot resolve the run's address {found[1]}: write an IP address as address of the site"
    if found := _CONNECT.search(words):
        return (
            f"it cannot reach the run at {found[1]} ({found[2]}): have address of the site name this machine as the "
            "workers' machines reach it, and port one that no firewall closes"
        )
    lines = [line.strip() for line in words.splitlines() if line.strip() and not _NOISE.search(line)]
    return lines[-1] if lines else nothing


def why_gone(words: str) -> str:
    """Return why a worker that had joined is gone, "" if it did not write anything that says so.

    :param words: the last lines that it wrote.

    >>> why_gone("connected to manager n1:9123 via local address n2:1\\nno room\\ndisconnected from manager n1:9123")
    'no room'
    >>> why_gone("vine_worker: using 1 cores\\nconnected to manager n1:9123 via local address n2:1")
    ''
    """
    return explaining_line("\n".join(each for each in words.splitlines() if not _COMINGS.search(each)), "")
