"""Digests of files: the content's, and of large files taken but once."""

import json
import os
import time

import pytest

from ctxflow import files

LARGE = 5 << 20


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Where digests are remembered, with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_REMEMBERED", files._Remembered())
    return tmp_path / "cache" / "ctxflow" / "digests.jsonl"


@pytest.fixture
def weights(tmp_path):
    """A large file that nobody has touched lately."""
    path = tmp_path / "weights"
    path.write_bytes(b"w" * LARGE)
    os.utime(path, ns=(10**18, 10**18))
    return path


def in_another_process(monkeypatch):
    monkeypatch.setattr(files, "_REMEMBERED", files._Remembered())


def test_a_large_file_is_read_once_also_by_other_processes(store, weights, monkeypatch):
    before = files.digest_path(weights)
    assert json.loads(store.read_text())[0] == str(weights)
    assert store.stat().st_mode & 0o777 == 0o600
    in_another_process(monkeypatch)
    weights.chmod(0)  # For those who are not root: it cannot even be read.
    store.write_text(store.read_text().replace(before, "as remembered"))
    assert files.digest_path(weights) == "as remembered"


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_is_not_as_it_was_is_read_again(store, weights, monkeypatch, change):
    before = files.digest_path(weights)
    store.write_text(store.read_text().replace(before, "as remembered"))
    in_another_process(monkeypatch)
    if change == "size":
        with open(weights, "ab") as file:
            file.write(b"w")
        os.utime(weights, ns=(10**18, 10**18))
    elif change == "time":
        os.utime(weights, ns=(10**18, 2 * 10**18 - 1))
    else:
        (weights.parent / "other").write_bytes(b"w" * LARGE)
        os.replace(weights.parent / "other", weights)
        os.utime(weights, ns=(10**18, 10**18))
    assert (files.digest_path(weights) == before) == (change != "size")


def test_a_file_that_may_still_change_is_not_remembered(store, weights):
    os.utime(weights)
    files.digest_path(weights)
    assert not store.exists()
    os.utime(weights, ns=(time.time_ns() - 10**10,) * 2)
    files.digest_path(weights)
    assert store.exists()


@pytest.mark.parametrize("text", [b"", b"no json\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"a": 1}\n'])
def test_a_store_that_is_broken_costs_a_reading(store, weights, text):
    store.parent.mkdir(parents=True)
    store.write_bytes(text)
    assert files.digest_path(weights) == files.digest_path(weights)


def test_a_store_that_cannot_be_written_is_no_reason_to_fail(store, weights):
    store.parent.parent.write_text("a file where a folder should be")
    assert len(files.digest_path(weights)) == 32


def test_files_of_a_folder_by_their_names(store, tmp_path):
    for name in ("config.json", "deep/part", ".git/HEAD", "deep/.hidden", "__pycache__/x.pyc"):
        (tmp_path / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lm" / name).write_text(name)
    found = files.digest_files(tmp_path / "lm")
    assert sorted(found) == ["config.json", "deep/part"]
    assert found["deep/part"] == files.digest_path(tmp_path / "lm" / "deep" / "part")
    assert files.digest_files(tmp_path / "lm" / "config.json") == {"config.json": found["config.json"]}
    with pytest.raises(FileNotFoundError, match="does not exist"):
        files.digest_files(tmp_path / "gone")


def test_how_far_it_is_read_is_told(store, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", 0.0)
    monkeypatch.setattr(files, "_EVERY", 0.001)
    with open(tmp_path / "weights", "wb") as file:
        file.truncate(100 << 20)
    told = []
    files.digest_files(tmp_path / "weights", lambda done, total: told.append((done, total)))
    assert told and {total for _, total in told} == {100 << 20}
    assert told == sorted(told) and told[-1][0] <= 100 << 20
    told.clear()
    files.digest_files(tmp_path / "weights", lambda done, total: told.append((done, total)))
    assert not told, "the second time it is known"
