"""Files that are there whole or not at all, whatever lies in their place or beside it."""

import os
import stat
from pathlib import Path

import pytest

from ctxflow.files import open_new, part_of, written_whole


def test_nothing_is_seen_of_it_before_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), written_whole(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_a_link_beside_it_leads_nowhere(tmp_path):
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_bytes(b"mine")
    part_of(path).symlink_to(precious)
    with written_whole(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), path.is_symlink(), precious.read_bytes()) == (b"new", False, b"mine")


def test_a_name_that_comes_back_is_given_up(tmp_path, monkeypatch):
    remove, path = os.unlink, tmp_path / "part"

    def and_again(name):
        remove(name)
        Path(name).symlink_to("precious")

    path.write_bytes(b"")
    monkeypatch.setattr(os, "unlink", and_again)
    with pytest.raises(FileExistsError, match="again and again"):
        open_new(path)
    assert not (tmp_path / "precious").exists()


def test_the_umask_says_who_reads_it(tmp_path):
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_file_and_name_are_on_the_disk_in_order(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def renamed(source, target):
        done.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with written_whole(tmp_path / "file") as file:
        file.write(b"text")
    assert done == [("sync", "file.part"), ("rename", "file"), ("sync", tmp_path.name)]
    done.clear()
    with written_whole(tmp_path / "file", sync=False):
        pass
    assert done == [("rename", "file")]
