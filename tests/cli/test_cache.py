"""`ctxflow cache`: what it shows, and what it removes."""

import json
import os
from pathlib import Path

import pytest
from in_process import ctxflow
from typer.testing import CliRunner

from ctxflow.cli.app import app
from ctxflow.errors import UsageError
from ctxflow.host.host_cache import HostCache


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def held(folder):
    """A worker's cache with two entries, of which it holds one."""
    cache = HostCache(folder)
    for name in ("weights.bin", "words.txt"):
        cache.put(name.partition(".")[0], lambda path: Path(path).write_bytes(b"x" * 2000), name)
    cache.release("words")
    yield cache
    cache.close()


def run(*words):
    done = CliRunner().invoke(app, ["cache", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_it_shows_what_is_there_and_who_uses_it(folder, held):
    lines = run(folder).splitlines()
    assert len(lines) == 3 and lines[2].startswith(f"{folder}/{os.geteuid()}: 2 entries, 4 kB; ")
    [weights] = [line for line in lines if "weights.bin" in line]
    assert weights.startswith("     2 kB  used ") and weights.endswith(f"weights.bin  in use by {os.getpid()}")


def test_a_site_file_names_it_with_its_limit(folder, held, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text(f'engine = "taskvine"\n[[tiers]]\ncache = "{folder}"\ncache_gb = 3\n')
    assert "2 entries, 4 kB of 3 GB at most; " in run(str(site))
    site.write_text('engine = "taskvine"\n[[tiers]]\n')
    with pytest.raises(UsageError, match=r"no tier of .* has a cache: write cache ="):
        run(str(site))


def test_empty_removes_what_nobody_uses(folder, held):
    assert run(folder, "--empty").splitlines()[-1] == "removed 1 entry, 2 kB"
    [cache] = json.loads(run(folder, "--json"))["caches"]
    assert [(entry["name"], entry["held"]) for entry in cache["entries"]] == [("weights.bin", True)]
    assert cache["bytes"] == 2000
    held.close()
    [cache] = json.loads(run(folder, "--empty", "--json"))["caches"]
    assert [entry["name"] for entry in cache["removed"]] == ["weights.bin"] and not cache["entries"]


def test_a_machine_without_one_has_nothing_and_gets_nothing(tmp_path):
    assert "nothing of yours is on this machine" in run(str(tmp_path))
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_something_else_is_refused_in_a_sentence(tmp_path):
    own = tmp_path / "scratch" / str(os.geteuid())
    (own / "work").mkdir(mode=0o700, parents=True)
    own.chmod(0o700)
    (own / "work" / "thesis.txt").write_text("precious")
    done = ctxflow("cache", tmp_path / "scratch", "--empty")
    assert done.returncode == 1 and done.stderr == (
        f"ctxflow: {own} holds what is no cache of ctxflow, so that it is not used as one: name another folder\n"
    )
    assert (own / "work" / "thesis.txt").read_text() == "precious"
