import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from little_environment import LITTLE

import ctxflow
from ctxflow.environments import archiving

SOURCES = Path(ctxflow.__file__).parents[1]


def site_of(prefix):
    return next(prefix.glob("lib/python*/site-packages"))


def make_environment(prefix):
    """A virtual environment with a package in C and one in Python, and ctxflow as a checkout in development."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    import cloudpickle
    import zmq

    for package, name in ((zmq, "pyzmq"), (cloudpickle, "cloudpickle")):
        place = Path(package.__file__).parent
        for path in [place, *place.parent.glob(f"{name}.libs"), *place.parent.glob(f"{name}-*.dist-info")]:
            shutil.copytree(path, site_of(prefix) / path.name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (site_of(prefix) / "__editable__.ctxflow.pth").write_text(f"{SOURCES}\n")
    script = prefix / "bin" / "say"
    script.write_text(f"#!{prefix}/bin/python\nimport sys, zmq\nprint(sys.prefix, sys.argv[1])\n")
    script.chmod(0o755)
    return prefix


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("original") / "analysis")


def prepare(patch):
    """The tests' own path is no part of the environment, and short-lived archives are not compressed."""
    patch.delenv("PYTHONPATH", raising=False)
    patch.setattr(archiving, "_LEVEL", 0)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    prepare(monkeypatch)


@pytest.fixture(scope="session")
def packed(environment, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        return archiving.pack_environment(environment, tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="session")
def little(environment, tmp_path_factory):
    """No more of the environment than its interpreter needs to start."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        return archiving.pack_environment(environment, tmp_path_factory.mktemp("archives"), exclude=LITTLE)
