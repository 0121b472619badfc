"""The worker's half: whole or not at all, whoever else does the same, and only where it fits."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from ctxflow.environments import opening
from ctxflow.environments.opening import UnusableEnvironment, check_machine, open_environment


def test_needs_only_the_standard_library(little, tmp_path):
    shutil.copy(opening.__file__, tmp_path / "opening.py")
    command = [sys.executable, "-I", "-S", "opening.py", str(little.path), "there"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/there/bin/python\n"


def test_racing_processes_share_one_folder(little, tmp_path):
    command = [sys.executable, "-I", "-S", opening.__file__, str(little.path), str(tmp_path / "there")]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True), range(4)))
    assert {run.stdout for run in done} == {f"{tmp_path}/there/bin/python\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_is_open_is_kept(little, tmp_path):
    python = open_environment(little.path, tmp_path / "there")
    mark = tmp_path / "there" / "mark"
    mark.touch()
    assert open_environment(little.path, tmp_path / "there") == python
    assert mark.exists()


def test_another_folder_is_not_touched(little, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(UnusableEnvironment, match="holds something else than this environment: give"):
        open_environment(little.path, tmp_path / "there")
    assert os.listdir(tmp_path / "there") == ["mine"]


def test_damaged(little, tmp_path):
    content = little.path.read_bytes()
    damaged = {
        "short": content[:-5000],
        "bent": content[:500_000] + b"bent" + content[500_004:],
        "bent at the end": content[:-50_000] + b"bent" + content[-49_996:],
    }
    for name, bad in damaged.items():
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(UnusableEnvironment, match=r"is damaged .* copy or pack it again"):
            open_environment(tmp_path / name, tmp_path / "there")
    assert sorted(os.listdir(tmp_path)) == sorted(damaged)


def test_no_environment(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "notes.txt", "notes.txt")
    for name in ("notes.txt", "other.tar.gz"):
        with pytest.raises(UnusableEnvironment, match=r"is no packed environment .* make one with `ctxflow env pack`"):
            open_environment(tmp_path / name, tmp_path / "there")


def test_machines_that_do_not_fit(little):
    check_machine(little.manifest)
    with pytest.raises(
        UnusableEnvironment, match=r"packed for linux-riscv64 and this machine is linux-\w+: pack it on"
    ):
        check_machine(little.manifest | {"platform": "linux-riscv64"})
    with pytest.raises(
        UnusableEnvironment, match=r"needs the C library glibc 2\.999 or newer and this machine has 2\.\d+"
    ):
        check_machine(little.manifest | {"glibc": "2.999"})


def test_an_interpreter_that_does_not_start(little, tmp_path):
    text = json.dumps(little.manifest).encode()
    with tarfile.open(tmp_path / "broken.tar.gz", "w:gz") as tar:
        program = b"#!/bin/sh\necho no such library >&2; exit 127\n"
        for name, content in ((opening.MANIFEST, text), ("bin/python", program)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(UnusableEnvironment, match=r"does not start on .*: no such library"):
        open_environment(tmp_path / "broken.tar.gz", tmp_path / "there")
    assert os.listdir(tmp_path) == ["broken.tar.gz"]
