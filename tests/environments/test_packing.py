"""Environments are packed for real, and run with the original out of the way."""

import json
import os
import re
import shutil
import subprocess
import tarfile

import pytest
import zmq
from little_environment import LITTLE

from ctxflow.environments.archiving import pack_environment
from ctxflow.environments.opening import open_environment, read_manifest
from ctxflow.errors import CtxflowError

NO_INTERPRETER = (*LITTLE, "lib/bundled/*", "lib/python3.??/[!s]*")
CLEAN = {"HOME": "/nonexistent", "PATH": os.defpath}


def run(python, program, **options):
    command = [str(python), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CLEAN, cwd="/", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names(packed):
    with tarfile.open(packed.path) as tar:
        return tar.getnames()


def site_of(prefix):
    return next(prefix.glob("lib/python*/site-packages"))


@pytest.fixture
def copied(environment, tmp_path):
    """The environment again, to be changed."""
    return shutil.copytree(environment, tmp_path / "analysis", symlinks=True)


@pytest.fixture(scope="module")
def elsewhere(environment, packed, tmp_path_factory):
    """The environment, opened and used while the original is gone: its folder, what it told, and what a script said."""
    there = tmp_path_factory.mktemp("elsewhere") / "a b" / "there"
    gone = environment.with_name("gone")
    environment.rename(gone)
    try:
        python = open_environment(packed.path, there)
        program = (
            "import sys, json, ssl, sqlite3, zmq, cloudpickle, ctxflow, ctxflow.host.context_host\n"
            "maps = [line.strip().split(None, 5)[-1] for line in open('/proc/self/maps') if '.so' in line]\n"
            "print(json.dumps([sys.prefix, sys.path, zmq.zmq_version_info(), ctxflow.__file__, maps]))"
        )
        told = json.loads(run(python, program))
        said = subprocess.run(
            [python.parent / "say", "x"], capture_output=True, text=True, check=True, env=CLEAN
        ).stdout
    finally:
        gone.rename(environment)
    return there, told, said


def test_runs_elsewhere_with_the_original_gone(elsewhere):
    there, (prefix, path, version, ours, libraries), said = str(elsewhere[0]), *elsewhere[1:]
    assert prefix == there
    assert tuple(version) == zmq.zmq_version_info()
    assert all(entry == "" or entry.startswith(there) for entry in path)
    assert ours.startswith(there)
    assert said == f"{there} x\n"
    machines = {re.sub(r"[-.].*", "", os.path.basename(name)) for name in libraries if not name.startswith(there)}
    assert machines <= {"libc", "libm", "libdl", "libpthread", "librt", "libutil", "ld", "libresolv", "libmvec"}


def test_nothing_names_the_old_place(environment, elsewhere):
    old = os.fsencode(environment)
    text = [path for path in elsewhere[0].rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in text if old in path.read_bytes()] == []


def test_same_contents_same_name_and_kept(environment, little, tmp_path):
    subprocess.run([environment / "bin" / "python", "-c", "import zmq, ctxflow"], check=True)  # Leaves bytecode.
    stages = []
    before = little.path.stat().st_mtime_ns
    again = pack_environment(environment, little.path.parent, LITTLE, lambda stage, *_: stages.append(stage))
    assert (again.path, again.new) == (little.path, False)
    assert little.path.stat().st_mtime_ns == before
    assert "Packing" not in stages
    other = pack_environment(environment, tmp_path, LITTLE)
    assert other.new
    assert other.path.read_bytes() == little.path.read_bytes()


def test_other_contents_or_mode_other_name(copied, little, tmp_path):
    same = pack_environment(copied, little.path.parent, LITTLE)
    assert (same.path, same.new) == (little.path, False)  # Whatever its place.
    module = site_of(copied) / "extra.py"
    module.write_text("x = 1\n")
    first = pack_environment(copied, tmp_path / "out", exclude=NO_INTERPRETER)
    module.chmod(0o755)
    second = pack_environment(copied, tmp_path / "out", exclude=NO_INTERPRETER)
    module.write_text("x = 2\n")
    third = pack_environment(copied, tmp_path / "out", exclude=NO_INTERPRETER)
    assert len({p.manifest["digest"] for p in (little, first, second, third)}) == 4


def test_manifest(packed):
    manifest = read_manifest(packed.path)
    assert manifest == packed.manifest
    assert manifest["packages"]["pyzmq"] == zmq.__version__
    assert re.fullmatch(r"2\.\d+", manifest["glibc"])
    assert packed.path.name == f"ctxflow-env-analysis-{manifest['digest'][:12]}.tar.gz"


def test_archive_is_sorted_and_tells_nothing_of_the_machine(packed):
    with tarfile.open(packed.path) as tar:
        members = tar.getmembers()
    assert members[0].name == "ctxflow-environment.json"
    assert [m.name for m in members[1:]] == sorted(m.name for m in members[1:])
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
    assert not [m.name for m in members if "__pycache__" in m.name or re.search(r"lib/python3[.0-9]+/test/", m.name)]


def test_exclude(packed, little):
    assert {"zmq*", "include/*"} <= set(LITTLE)
    assert [name for name in names(packed) if "zmq" in name.split("/")]
    assert [name for name in names(packed) if name.startswith("include/")]
    assert not [name for name in names(little) if "zmq" in name.split("/") or name.startswith("include/")]
    assert [name for name in names(little) if name.endswith("cloudpickle/__init__.py")]


def test_editable_installs_are_followed(copied, tmp_path):
    package = tmp_path / "elsewhere" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("where = __file__")
    (tmp_path / "elsewhere" / "data.bin").write_text("no module")
    hooked = tmp_path / "hooked.py"
    hooked.write_text("where = __file__")
    (site_of(copied) / "mine.pth").write_text(f"{package.parent}\n")
    (site_of(copied) / "__editable___hooked_finder.py").write_text(
        f"MAPPING = {{'hooked': {str(hooked.with_suffix(''))!r}}}"
    )
    (site_of(copied) / "__editable__.hooked.pth").write_text("import __editable___hooked_finder")
    packed = pack_environment(copied, tmp_path / "out", exclude=LITTLE)
    assert not [name for name in names(packed) if "data.bin" in name or "__editable__" in name]
    python = open_environment(packed.path, tmp_path / "there")
    shutil.rmtree(package.parent)
    hooked.unlink()
    assert run(python, "import mine, hooked; print(mine.where, hooked.where)").count(str(tmp_path / "there")) == 2


def test_system_site_packages_are_taken_where_the_environment_has_none(copied, tmp_path):
    system = tmp_path / "usr" / "site-packages"
    for version in ("1", "2"):
        place = system if version == "1" else site_of(copied)
        for name in ("both", "spread") if version == "2" else ("both", "spread", "lower"):
            (place / name).mkdir(parents=True)
            (place / name / ("__init__.py" if name != "spread" else f"part{version}.py")).write_text(f"v = {version}")
        (place / f"both-{version}.dist-info").mkdir()
        (place / f"both-{version}.dist-info" / "METADATA").write_text(f"Name: both\nVersion: {version}\n")
    (site_of(copied) / "zz.pth").write_text(f"{system}\n")
    packed = pack_environment(copied, tmp_path / "out", exclude=LITTLE)
    python = open_environment(packed.path, tmp_path / "there")
    program = "import both, lower, spread.part1, spread.part2, importlib.metadata as m; "
    assert run(python, program + "print(both.v, lower.v, m.version('both'))") == "2 1 2"
    assert "both-1.dist-info" not in "".join(names(packed))


def test_what_lies_in_a_home_directory_is_no_part_of_it(little, tmp_path):
    python = open_environment(little.path, tmp_path / "there")
    version = ".".join(little.manifest["python"].split(".")[:2])
    user = tmp_path / "home" / ".local" / "lib" / f"python{version}" / "site-packages"
    user.mkdir(parents=True)
    program = "import sys; print([entry for entry in sys.path if '.local' in entry])"
    command = [str(python), "-c", program]
    done = subprocess.run(command, env={"HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_refusals_say_what_to_do(copied, tmp_path, monkeypatch):
    with pytest.raises(CtxflowError, match="has no bin/python: give the path of one"):
        pack_environment(tmp_path, tmp_path / "out")
    (site_of(copied) / "_editable_impl_x.py").write_text("")
    (site_of(copied) / "x.pth").write_text("import _editable_impl_x")
    with pytest.raises(CtxflowError, match=r"editable install that cannot be followed \(_editable_impl_x\): install"):
        pack_environment(copied, tmp_path / "out")
    (site_of(copied) / "x.pth").unlink()
    (site_of(copied) / "__editable__.ctxflow.pth").unlink()
    with pytest.raises(CtxflowError, match=r"has no ctxflow, which a worker needs: run .*/bin/python -m pip install /"):
        pack_environment(copied, tmp_path / "out")


def test_an_interrupt_leaves_nothing(copied, tmp_path):
    def interrupt(stage, done, total):
        if stage == "Packing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_environment(copied, tmp_path / "out", NO_INTERPRETER, report=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_conda(little, tmp_path):
    """A prefix as conda lays it out, with files that name it, through conda-pack and back."""
    pytest.importorskip("conda_pack")
    prefix = tmp_path / "conda"
    open_environment(little.path, prefix)
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").write_text("")
    (prefix / "etc").mkdir()
    (prefix / "etc" / "place.conf").write_text(f"root={prefix}\n")
    again = pack_environment(prefix, tmp_path / "out", exclude=LITTLE)
    assert again.path == pack_environment(prefix, tmp_path / "out", exclude=LITTLE).path
    prefix.rename(tmp_path / "gone")
    python = open_environment(again.path, tmp_path / "there")
    assert run(python, "import ctxflow, cloudpickle, sys; print(sys.prefix)") == str(tmp_path / "there")
    assert (tmp_path / "there" / "etc" / "place.conf").read_text() == f"root={tmp_path / 'there'}\n"
