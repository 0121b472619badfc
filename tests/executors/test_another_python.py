"""CTXFLOW_PYTHON: library processes of another Python, with packages of its own, than the driver's."""

import os
import subprocess
import sys
from pathlib import Path

import cloudpickle

from ctxflow import ContextExecutor, batch_app


@batch_app
def about(numbers):
    import sys

    try:
        import numpy  # noqa: F401

        found = True
    except ImportError:
        found = False
    return [(os.path.realpath(sys.prefix), found, list(sys.path)) for _ in numbers]


def test_its_packages_are_its_own_and_the_drivers_folders_come_along(tmp_path, monkeypatch):
    folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)
    monkeypatch.setenv("CTXFLOW_PYTHON", str(folder / "bin" / "python"))
    mine = str(tmp_path / "mine")
    monkeypatch.syspath_prepend(mine)
    with ContextExecutor(workers=1):
        prefix, numpy_found, path = about(1).result()
    assert prefix == os.path.realpath(folder)
    assert not numpy_found, "of the driver's own packages"
    assert path[0] == mine
    assert str(packages) in path
