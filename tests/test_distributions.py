"""What is published: the source distribution, the wheel, and what a package index shows of them."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
HOME = "https://example.org/ctxflow"
NOT_TOLD = {
    ".ci/run",
    ".gitignore",
    "executors",
    "policies",
    "src/ctxflow/examples",
}  # The links are made into what they lead to.
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def unpacked(sdist_file, tmp_path_factory):
    """The folder of an unpacked source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist_file) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def about(wheel):
    """What a wheel says of itself."""
    archive = zipfile.ZipFile(wheel)
    name = next(each for each in archive.namelist() if each.endswith("/METADATA"))
    return email.message_from_string(archive.read(name).decode())


def test_a_source_distribution_has_all_that_git_knows(sdist_file, unpacked, clean_tree):
    known = {path.relative_to(clean_tree).as_posix() for path in clean_tree.rglob("*") if not path.is_dir()}
    made = ("build/", "src/parsl_ctxflow.egg-info/", "papers/build/", "papers/ctxflow_papers.egg-info/")
    known = {name for name in known if not name.startswith(made)}  # Less what other tests have built in there.
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in known - there if name not in NOT_TOLD} == set()
    assert {"tests/test_distributions.py", "docs/taskvine.md", "CHANGELOG.md", "requirements/3.12.txt"} <= there
    assert [name for name in there if name.startswith("src/ctxflow/examples/prompt_for_fact/")]
    with tarfile.open(sdist_file) as archive:  # The unpacked one is run by other tests.
        assert not [name for name in archive.getnames() if "__pycache__" in name or name.endswith(".pyc")]


def test_its_tests_can_be_collected(unpacked):
    """Two rooms' are enough: it has the files of the tree."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:randomly",
        "tests/factory",
        "tests/rows",
    ]
    environment = {**os.environ, "PYTHONPATH": str(unpacked / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) tests collected", done.stdout)[1]) > 500


def test_the_wheel_made_of_it_is_the_one_made_of_the_tree(unpacked, wheel_file, build, tmp_path):
    from_sdist = build("wheel", unpacked, tmp_path)
    ours, theirs = (zipfile.ZipFile(path) for path in (wheel_file, from_sdist))
    assert {each.filename: each.CRC for each in ours.infolist() if "dist-info" not in each.filename} == {
        each.filename: each.CRC for each in theirs.infolist() if "dist-info" not in each.filename
    }
    assert about(wheel_file).items() == about(from_sdist).items()


def test_a_wheel_says_whose_it_is_and_under_which_licence(wheel_file):
    said = about(wheel_file)
    assert said["Name"] == "parsl-ctxflow"
    assert said["Author"] == "The ctxflow developers"
    assert "Apache-2.0" in (said["License-Expression"] or said["License"])
    assert said["License-File"] == "LICENSE"
    assert not said.get_all("Project-URL"), "who publishes it says where it is at home"
    assert [each for each in map(Requirement, said.get_all("Requires-Dist")) if each.name == "parsl"]


def test_without_a_home_a_description_has_no_link_into_the_tree(wheel_file):
    text = about(wheel_file).get_payload()
    assert [link for link in _LINK.findall(text) if not link.startswith("https://")] == []
    assert "`docs/batch.md`" in text and "TaskVine (`docs/taskvine.md`)" in text


def test_with_a_home_links_lead_there(clean_tree, build, tmp_path):
    said = about(build("wheel", clean_tree, tmp_path, CTXFLOW_HOME=HOME))
    links = [link for link in _LINK.findall(said.get_payload()) if link.startswith(HOME)]
    assert len(links) > 20
    for link in links:
        kind, _, path = link.removeprefix(f"{HOME}/").partition("/main/")
        place = clean_tree / path.partition("#")[0]
        assert place.is_dir() if kind == "tree" else place.is_file(), link
    assert [link for link in _LINK.findall(said.get_payload()) if not link.startswith("https://")] == []
    urls = dict(each.split(", ") for each in said.get_all("Project-URL"))
    assert set(urls) == {"Source", "Documentation", "Changelog"} and urls["Source"] == HOME


def test_readmes_links_lead_to_what_is_there():
    for link in _LINK.findall((ROOT / "README.md").read_text()):
        if not link.startswith(("https://", "#")):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_the_licence_of_what_is_used_beside_it_is_told_once():
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    assert sum(text.count("GPL-2.0") for text in texts) == 1
