"""The command as from a shell, but in this process: what it prints and its exit status cost no interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections.abc import Mapping

import pytest

from ctxflow.cli.app import main


def ctxflow(*words: object, cwd: object = None, env: Mapping[str, str] = types.MappingProxyType({})):
    """Run `ctxflow WORDS` in a folder, with variables changed; return what `subprocess.run` would of it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ctxflow", *map(str, words)])
        for name, value in {"COLUMNS": "80", **env}.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(os.fspath(cwd))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=said[0], stderr=said[1])
