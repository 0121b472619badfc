"""Whatever is killed first, nothing of an engine is left: no process, and nothing in /dev/shm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from ctxflow.host.linux import python_path
from waiting import eventually, nothing_left

PROGRAM = '''
import json, os, sys, time
import ctxflow

@ctxflow.context()
async def engine():
    """Stands for one: a child, perhaps in a session of its own, and segments of both."""
    import subprocess
    from multiprocessing import shared_memory
    own = shared_memory.SharedMemory(create=True, size=1 << 20)
    program = (
        "import time; from multiprocessing import shared_memory\\n"
        "theirs = shared_memory.SharedMemory(create=True, size=1 << 20)\\n"
        "print(theirs.name, flush=True); time.sleep(600)"
    )
    apart = os.environ["APART"] == "1"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=apart)
    return own, child, child.stdout.readline().decode().strip()

@ctxflow.item_app(engine())
async def look(engine, item):
    import asyncio
    if item:
        open(os.environ["BEGUN"], "w").close()
        await asyncio.sleep(600)
    own, child, theirs = engine
    found = {"host": os.getppid(), "library": os.getpid(), "child": child.pid}
    return {**found, "segments": [own.name.lstrip("/"), theirs.lstrip("/")]}

if __name__ == "__main__":
    with ctxflow.ContextExecutor(workers=1):
        found = look(0).result()
        print(json.dumps({"driver": os.getpid(), **found}), flush=True)
        for _ in look.map(range(1, 6)):
            pass
'''


@pytest.mark.parametrize("killed", ["child", "library", "host", "driver"])
def test_nothing_is_left_of_an_engine_whatever_is_killed_first(tmp_path, killed):
    (tmp_path / "program.py").write_text(PROGRAM)
    for folder in ("tmp", "home"):
        (tmp_path / folder).mkdir()
    variables = {**os.environ, **python_path(), "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    # What has left its session is found by its host alone.
    variables["APART"] = str(int(killed != "host"))
    begun = tmp_path / "begun"
    variables["BEGUN"] = str(begun)
    command = [sys.executable, "program.py"]
    # Standard error is a file: what outlives the program would keep a pipe open.
    with (
        (tmp_path / "errors").open("wb") as errors,
        forked.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=errors) as program,
    ):
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line, (tmp_path / "errors").read_text()
        found = json.loads(line)
        eventually(begun.exists)
        os.kill(found[killed], signal.SIGKILL)
        try:
            if killed in ("library", "host"):
                gone(found, ["library", "child"])
        finally:
            program.kill()
        gone(found, ["library", "child", "host"])
    assert not os.listdir(tmp_path / "tmp") or killed != "driver"


def gone(found: dict[str, Any], names: list[str]) -> None:
    """Wait until these processes have ended, and no segment is left."""

    def left() -> set[str]:
        segments = {path.name for path in Path("/dev/shm").iterdir()} & set(found["segments"])
        return segments | {name for name in names if lives(found[name])}

    nothing_left(left)


def lives(pid: object) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
