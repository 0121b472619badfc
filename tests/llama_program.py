"""Find llama.cpp's server: installed, or in the testbed's root, whose libraries it then runs with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_TESTBED = Path(__file__).resolve().parent.parent / "testbed"
_BACKENDS = (("cooperlake", "avx512_bf16"), ("icelake", "avx512_vnni"), ("haswell", "avx2"), ("x64", ""))
"""Builds of its kernels, the quickest first, and what a processor needs for them."""

WHY_NOT = "llama-server is neither installed nor in the testbed's root: `sudo testbed/up --root-only` makes one"


def find_llama_server(folder: Path) -> str | None:
    """Return a program called llama-server, made in a folder where it is the testbed's; None if there is none."""
    if installed := shutil.which("llama-server"):
        return installed
    sys.path.insert(0, str(_TESTBED))
    try:
        from pool import root
    finally:
        sys.path.remove(str(_TESTBED))
    found = root.find()
    if found is None or not (found / "usr/bin/llama-server").exists() or not os.access(found, os.X_OK):
        return None
    flags = Path("/proc/cpuinfo").read_text()
    kernels = next(name for name, needed in _BACKENDS if needed in flags)
    libraries = found / "usr/lib/x86_64-linux-gnu"
    program = folder / "llama-server"
    program.write_text(
        f"#!/bin/sh\n"
        f"export GGML_BACKEND_PATH={libraries}/ggml/backends0/libggml-cpu-{kernels}.so\n"
        f"exec {found}/lib64/ld-linux-x86-64.so.2 --library-path {libraries}:{libraries}/llama "
        f'{found}/usr/bin/llama-server "$@"\n'
    )
    program.chmod(0o755)
    return str(program)
