"""Files that are acted on as if this user had said it: none that others may have written."""

import logging
import os

import pytest

from ctxflow.files import NotOwnError, check_own_folder, make_own_folder, open_own, own_folder, read_own


def test_ones_own_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"some text")
    (tmp_path / "file").chmod(0o644)
    assert read_own(str(tmp_path / "file"), 5) == b"text"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(mode)
    with pytest.raises(NotOwnError, match="call chmod go-w"):
        read_own(str(tmp_path / "file"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(mode | 0o100)
    for look in (check_own_folder, make_own_folder):
        with pytest.raises(NotOwnError, match="call chmod go-w"):
            look(str(tmp_path / "folder"))


def test_another_users_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotOwnError, match="belongs to another user"):
        read_own(str(tmp_path / "file"))
    with pytest.raises(NotOwnError, match="belongs to another user"):
        check_own_folder(str(tmp_path))


def test_links_and_pipes_are_no_files(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe"):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError):
            open_own(str(tmp_path / name))
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_of_ones_own_may_be_elsewhere(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    assert own_folder(str(tmp_path / "home")) and not own_folder(str(tmp_path / "none"))


def test_a_folder_that_is_not_used_is_told_once(tmp_path, caplog):
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        assert not own_folder(str(tmp_path)) and not own_folder(str(tmp_path))
    assert len(caplog.records) == 1
