"""A stand-in for a process that hangs in the kernel: killed, it keeps its memory and does not end before it is let go.

Its tracer asks to be told before it ends, and then leaves it there. Linux lets a process of one's own be traced, unless
its administrator forbids that.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

_TRACER = """
import ctypes, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
seize, interrupt, pid, options, holds = 0x4206, 0x4207, *map(int, sys.argv[1:])
failed = libc.ptrace(seize, pid, None, options)
print(failed or (holds and libc.ptrace(interrupt, pid, None, None)), flush=True)
signal.pause()
"""


_TRACE_EXIT = 0x40


def unkillable(pid):
    """Have a process outlive SIGKILL until the block ends."""
    return traced(pid, _TRACE_EXIT)


@contextlib.contextmanager
def traced(pid, options=0, *, holds=False):
    """Have a debugger trace a process until the block ends, and hold it if it `holds`."""
    words = map(str, (pid, options, int(holds)))
    tracer = subprocess.Popen([sys.executable, "-c", _TRACER, *words], stdout=subprocess.PIPE, text=True)
    try:
        if tracer.stdout.readline().strip() != "0":
            pytest.skip("this machine lets no process be traced")
        yield
    finally:
        tracer.kill()
        tracer.communicate()


def stopped(pid):
    """Stop a process, as a machine does that hangs."""
    os.kill(pid, signal.SIGSTOP)
