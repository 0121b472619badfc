"""Artifacts as one file: what is packed is taken, the same content is the same bytes, and nothing else is taken."""

import io
import os
import tarfile

import pytest

from ctxflow.files import digest_now
from ctxflow.host.artifact_archives import take_archive, write_archive


@pytest.fixture
def made(tmp_path):
    for name, mode in (("deep/kernel.so", 0o755), ("graph", 0o644)):
        path = tmp_path / "made" / "inductor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    os.symlink("/etc/passwd", tmp_path / "made" / "inductor" / "link")
    return tmp_path / "made"


def packed(folder, path):
    write_archive(str(folder), str(path))
    return str(path), digest_now(path)


def test_what_is_packed_is_taken_but_links(made, tmp_path):
    archive, digest = packed(made, tmp_path / "archive")
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    assert take_archive(archive, digest, {"inductor": str(place), "triton": str(other)})
    assert sorted(os.listdir(place)) == ["deep", "graph"] and not other.exists()
    assert (place / "deep" / "kernel.so").read_text() == "deep/kernel.so"
    assert os.access(place / "deep" / "kernel.so", os.X_OK) and not os.access(place / "graph", os.X_OK)
    assert not take_archive(archive, digest, {"triton": str(other)})


def test_the_same_content_is_the_same_bytes(made, tmp_path):
    first = packed(made, tmp_path / "first")[1]
    os.utime(made / "inductor" / "graph", (1, 1))
    os.rename(made, tmp_path / "elsewhere")
    assert packed(tmp_path / "elsewhere", tmp_path / "second")[1] == first
    (tmp_path / "elsewhere" / "inductor" / "graph").chmod(0o755)
    assert packed(tmp_path / "elsewhere", tmp_path / "third")[1] != first


def test_one_byte_more_or_another_is_refused(made, tmp_path):
    archive, digest = packed(made, tmp_path / "archive")
    place = str(tmp_path / "place")
    with open(archive, "r+b") as file:
        file.seek(600)
        byte = file.read(1)
        file.seek(600)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ValueError, match="does not have its digest"):
        take_archive(archive, digest, {"inductor": place})
    assert not os.path.exists(place)


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "device", "way out"])
def test_what_is_no_plain_file_in_it_is_refused(tmp_path, kind):
    archive = tmp_path / "archive"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("../../out" if kind == "way out" else "inductor/x")
        member.type = {"symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}.get(
            kind, tarfile.REGTYPE
        )
        member.linkname = "/etc/passwd" if member.type != tarfile.REGTYPE else ""
        tar.addfile(member, io.BytesIO())
    with pytest.raises(ValueError):
        take_archive(str(archive), digest_now(archive), {"inductor": str(tmp_path / "place")})
    assert not (tmp_path / "place").exists() and not (tmp_path.parent / "out").exists()
