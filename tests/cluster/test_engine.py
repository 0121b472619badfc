"""The TaskVine engine on the testbed: the engines' contract, Parsl's own suite, and the main example, unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suite.depth import for_release
from waiting import patience

if TYPE_CHECKING:
    from conftest import Testbed

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path("/checkout") / Path(__file__).parent.relative_to(ROOT)
PARSL = "$(python -c 'import os, parsl; print(os.path.dirname(parsl.__file__))')/tests"
PYTEST = "python -m pytest -q -p no:cacheprovider --no-header"


def shell(testbed: Testbed, command: str, limit: float) -> str:
    """Run a command in a fresh directory of the user's on the submit host, and give all that it wrote."""
    # Threads of several processes that compute on the same cores spend their time waiting for each other.
    words = f"export OMP_NUM_THREADS=1; cd $(mktemp -d) && {command} 2>&1"
    done = testbed.command("run", "bash", "-c", words, check=False, limit=limit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.timeout(500)
def test_contract(testbed: Testbed) -> None:
    out = shell(testbed, f"{PYTEST} --noconftest --timeout {patience(200)} -n 2 {INSIDE}/taskvine_inside.py", 400)
    assert re.search(r"\d\d passed in", out), out[-500:]


@pytest.mark.release
@pytest.mark.timeout(500)
def test_parsl_suite(testbed: Testbed) -> None:
    config = INSIDE.parent / "parsl_suite" / "taskvine.py"
    # As in tests/test_parsl_suite.py.
    chosen = "not cleannet and not test_timeout_after_exception and not (test_resource_spec and test_resource)"
    out = shell(testbed, f"{PYTEST} {PARSL} -k '{chosen}' --config {config} --timeout {patience(200)}", 400)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 100, out[-500:]


@pytest.mark.release
@pytest.mark.timeout(600)
def test_the_example_answers_as_on_one_machine(testbed_with_torch: Testbed) -> None:
    program = "/checkout/examples/prompt_for_fact/prompt_for_fact.py --limit 6 --models minilm --workers 2 {}"
    site = "--site /checkout/site-configs/testbed.toml"
    show = "tail -n +1 prompt-for-fact/results/*.jsonl | grep answer; echo; cat prompt-for-fact/evaluation.json"
    outputs = [
        shell(testbed_with_torch, f"python {program.format(where)} >/dev/null && {show}", 280) for where in (site, "")
    ]
    assert outputs[0].count('"answer"') == 6 * 3 * 3
    assert outputs[0] == outputs[1]


@pytest.mark.release
@pytest.mark.timeout(300)
def test_scores_are_those_of_one_machine(testbed_with_torch: Testbed) -> None:
    out = json.loads(shell(testbed_with_torch, f"python {INSIDE}/example_inside.py 2>/dev/null", 280))
    assert out["shape"] == [96, 384]
    assert out["difference"] < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["pool", *for_release("local")])
def test_files_travel_with_calls(testbed: Testbed, where: str) -> None:
    argument = "local" if where == "local" else ""
    found = json.loads(shell(testbed, f"python {INSIDE}/files_inside.py {argument}", 240))
    assert found["elsewhere"]
    assert found["last"] == "there and back and back"
    assert (found["printed"], found["said"]) == ([0, "BashExitFailure"], "therethere")
    assert (found["crashed"], found["there"], found["missing"]) == ("CallCrashed", False, "FileNotFoundError")
    assert found["items"] == [10, 11, 12]
    assert (found["big"], found["many"], found["came"]) == (50_000_000, 200, 200)
    assert found.get("fetched", "there and back") == "there and back"
    assert found["workers"] == 1, "none was given up"
    assert found["beside"] == []
    left, lost = found["told"]
    assert left == "a call of copy left left-behind in its folder on a worker, which is removed after it"
    assert lost.startswith("the context ten was lost on worker "), "by the call that ends its process"


@pytest.mark.timeout(300)
def test_the_users_modules_travel_and_those_of_ctxflow_that_they_import(testbed: Testbed) -> None:
    out = shell(testbed, f"python {INSIDE}/modules_inside.py", 240)
    assert out.splitlines() == [f"{[n * 6 for n in range(10)]} 15", "['ctxflow.pyz', 'ctxflow-rest.zip']"]
