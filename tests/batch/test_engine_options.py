"""What is said about an engine on the command line: passed on, shown, and refused before anything starts."""

import importlib
import json
import shutil
import sys
import threading

import pytest
from batch_helpers import write_lines

from ctxflow.batch.engine_checks import LaterChecks
from ctxflow.batch.job import load_job
from ctxflow.batch.job_files import files_of
from ctxflow.errors import UsageError
from ctxflow.models import vllm_options
from ctxflow.models.vllm_options import check_options_apart
from ctxflow.testing.small_models import make_causal_lm
from waiting import patience

MODEL = ("-m", "org/model")
ELSEWHERE = ("--site", "elsewhere.toml")  # Where this machine lacks what is asked for.
PLAYED_VLLM = {
    "engine/arg_utils.py": """
class AsyncEngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--max-model-len", type=int)
        return parser
""",
    "entrypoints/launchers/cli_args.py": """
class BaseFrontendArgs:
    add_cli_args = staticmethod(lambda parser: parser)
""",
    "utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
}
"""As much of vLLM as says that it does not have an option."""


@pytest.fixture
def requests(folder):
    """A file of requests: two that vLLM can do, one of which transformers cannot, and one that nobody can."""
    hello = {"messages": [{"role": "user", "content": "Hello"}]}
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    bodies = [hello, {**hello, "min_p": 0.1}, {"messages": [{"role": "user", "content": [picture]}]}]
    rows = [{"custom_id": str(n), "url": "/v1/chat/completions", "body": body} for n, body in enumerate(bodies)]
    write_lines(folder / "in.jsonl", rows)
    (folder / "elsewhere.toml").write_text('engine = "taskvine"\n[[tiers]]\nname = "a"\nprovider = "slurm"\n')
    return ("batch", "in.jsonl", "-o", "out.jsonl", *MODEL, "--dry-run")


def test_a_dry_run_shows_the_engine_and_which_requests_are_not_for_it(command, requests):
    status, said, out = command(*requests, output=True)
    assert (status, said) == (0, "")
    assert "min_p = 0.1 is not for the backend transformers: run it with --backend vllm or --backend server" in out
    assert "an image at an address, and nothing is fetched" in out, "which no other backend does"
    more = ("--backend", "vllm", "--engine-option", "max_model_len=512", "--engine-option", "enforce-eager=true")
    status, said, out = command(*requests, *more, *ELSEWHERE, "--json", output=True)
    assert (status, said) == (0, "")
    found = json.loads(out)
    assert found["does"] == {"model": "org/model", "task": "chat", "backend": "vllm", "max_model_len": 512,
                             "enforce-eager": True}  # fmt: skip
    assert ["error" in row for row in found["first"]] == [False, False, True]
    assert "an image at an address, and nothing is fetched" in found["first"][2]["error"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--backend", "server"), "a server is started by a command: give --server-command"),
        (("--engine-option", "max_model_len"), "--engine-option 'max_model_len' is not to be understood: write NAME="),
        (("--engine-option", "a=1", "--engine-option", "a=2"), "--engine-option names a twice"),
        (("--backend", "vllm", "--adapter", "french"), "--adapter 'french' is not to be understood: write NAME=PATH"),
        (("--adapter", "french=x"), "adapters are for --backend vllm"),
        (("--backend", "vllm", "--adapter", "french=here"), "holds no adapter_config.json"),
        (("--backend", "vllm", "--adapter", "french=adapters"), "the adapter french, adapters, is not there"),
        (("--backend", "vllm", "--adapter", "model=lora"), "the adapter 'model' is called as the job's model is"),
        (("--backend", "vllm", "--adapter", "own=lora", "--engine-option", "served_model_name=own"),
         "the adapter 'own' is called as the job's model is"),
        (("--backend", "ollama"), "ollama"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_about_an_engine_is_refused(folder, command, requests, words, sentence):
    (folder / "here").mkdir()
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text("{}")
    status, said = command(*requests, *words)
    assert status == 2 and sentence in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-m", "here"), "the folder here holds no model: name one with a config.json"),
        (("--named-model", "small="), "a model is called ''"),
        ((*MODEL, "--stop", ""), "holds something that is no string, or an empty one: give strings"),
    ],
)
def test_what_is_no_model_and_no_stop_is_told_before_a_worker_is_asked(folder, command, words, sentence):
    (folder / "here").mkdir()
    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    status, said = command("batch", "in.jsonl", "-o", "out.jsonl", "--dry-run", *words)
    assert status == 2 and sentence in " ".join(said.split()) and "Traceback" not in said


def test_values_of_options_are_json_and_those_of_adapters_are_text(folder, command, requests):
    (folder / "5").mkdir()
    (folder / "5" / "adapter_config.json").write_text("{}")
    status, _, out = command(*requests, "--backend", "vllm", "--engine-option", 'limits={"image": 2}', "--json",
                             *ELSEWHERE, "--engine-option", "name=3x", "--adapter", "3=5", output=True)  # fmt: skip
    assert status == 0
    assert json.loads(out)["does"]["limits"] == {"image": 2} and json.loads(out)["does"]["name"] == "3x"


def test_the_options_of_an_encoder_are_told_by_name(folder, command):
    pytest.importorskip("sentence_transformers")
    write_lines(folder / "in.jsonl", [{"text": "One"}])
    words = ("batch", "in.jsonl", "-o", "out.jsonl", *MODEL, "-t", "embed", "--dry-run")
    assert command(*words, "--engine-option", "max_batch_tokens=512")[0] == 0
    status, said = command(*words, "--engine-option", "max_batch_token=512", "--engine-option", "dtype=float32")
    assert status == 2
    assert "max_batch_token is none of the backend transformers: did you mean 'max_batch_tokens'?" in said
    assert "--engine-option dtype is a flag of its own: give --dtype" in said


def test_a_job_that_goes_on_with_another_engine_is_another_job(folder, tmp_path_factory):
    from ctxflow.batch.driver import run_job

    model = str(make_causal_lm(tmp_path_factory.mktemp("lm")))
    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    choices = {"input": "in.jsonl", "output": "out.jsonl", "model": model, "device": "cpu", "max_new_tokens": 3}
    assert run_job(load_job(None, **choices)).exit_status == 0
    assert run_job(load_job(None, **choices)).already
    with pytest.raises(ValueError, match=r"engine_options was \{\} and is \{'max_batch_size': 3\}"):
        run_job(load_job(None, **choices, engine_options={"max_batch_size": 3}))


@pytest.fixture
def vllm(tmp_path_factory, monkeypatch):
    """A vLLM that can be imported, and that prints; returns its folder."""
    root = tmp_path_factory.mktemp("packages")
    for name, text in PLAYED_VLLM.items():
        file = root / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root / "vllm", *(root / "vllm" / each for each in file.relative_to(root / "vllm").parents)):
            (folder / "__init__.py").touch()
        file.write_text(text)
    said = "import atexit; print('INFO: a platform was found'); atexit.register(print, 'INFO: the end')"
    (root / "vllm" / "__init__.py").write_text(said)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("PYTHONPATH", str(root))
    return root / "vllm"


WRONG = ("--backend", "vllm", "--gpus", "0", "--engine-option", "max_modle_len=512")
SENTENCE = "vLLM has no option max_modle_len: did you mean max_model_len?"


@pytest.mark.parametrize("more", [["--dry-run"], ["--site", "local"]])
@pytest.mark.parametrize("safe", ["", "1"])
def test_vllm_is_asked_in_a_process_of_its_own(folder, command, vllm, more, safe, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", safe)  # Where there is no current directory in the path to be left out.
    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    before = set(sys.modules)
    status, said = command("batch", "in.jsonl", "-o", "out.jsonl", *MODEL, *WRONG, *more)
    assert status == 2 and SENTENCE in " ".join(said.split()), said
    assert not [name for name in set(sys.modules) - before if name.partition(".")[0] == "vllm"]
    if more == ["--dry-run"]:
        assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"], "nothing was written"


def test_a_job_is_settled_before_another_process_gets_it(folder, vllm):
    from ctxflow.batch.driver import begin_job

    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    choices = {"backend": "vllm", "gpus": 0, "engine_options": {"max_modle_len": 512}, "model": "org/model"}
    with pytest.raises(UsageError, match="did you mean max_model_len"):
        begin_job(load_job(None, input="in.jsonl", output="out.jsonl", **choices))
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"], "nothing was written"


@pytest.mark.parametrize("how", ["fresh", "fresh without a journal", "retry_errors", "all rows failed"])
def test_what_is_there_stays_where_vllm_refuses_an_option(folder, vllm, how):
    from ctxflow.batch.driver import run_job

    write_lines(folder / "in.jsonl", [{"prompt": "One"}, {"prompt": "Two"}])
    (folder / "played.py").write_text(
        "def answer(items):\n    return items\n\n\ndef fail(items):\n    raise ValueError('none')\n"
    )
    files = files_of(folder / "out.jsonl", "jsonl")
    function = "played:fail" if how == "all rows failed" else "played:answer"
    run_job(load_job(None, input="in.jsonl", output="out.jsonl", function=function, column=("prompt",)))
    if how == "fresh without a journal":
        files.journal.unlink()
    before = {path: path.read_bytes() for path in (files.rows, files.errors, files.journal) if path.exists()}
    choices = {"backend": "vllm", "gpus": 0, "engine_options": {"max_modle_len": 512}, "model": "org/model"}
    flags = {flag: True for flag in ("fresh", "retry_errors") if how.startswith(flag)}
    with pytest.raises(UsageError, match="did you mean max_model_len"):
        run_job(load_job(None, input="in.jsonl", output="out.jsonl", **choices), **flags)
    assert {path: path.read_bytes() for path in before} == before


def test_workers_are_asked_for_meanwhile_but_get_no_row(folder, vllm, monkeypatch):
    from ctxflow.batch import engine_checks
    from ctxflow.batch.driver import run_job
    from ctxflow.executors.bare import BareExecutor
    from ctxflow.executors.live_run import LiveRun

    happened, enter = [], BareExecutor.__enter__

    def check(options):
        happened.append("checked")
        assert asked.wait(patience())
        raise UsageError(SENTENCE)

    def begin(self):
        found = enter(self)
        happened.append("asked")
        asked.set()
        return found

    asked = threading.Event()
    monkeypatch.setattr(engine_checks, "check_options_apart", check)
    monkeypatch.setattr(BareExecutor, "__enter__", begin)
    monkeypatch.setattr(LiveRun, "submit", lambda *given, **named: happened.append("submitted"))
    write_lines(folder / "in.jsonl", [{"prompt": "One"}])
    choices = {"backend": "vllm", "gpus": 0, "engine_options": {"max_modle_len": 512}, "model": "org/model"}
    with pytest.raises(UsageError, match="did you mean max_model_len"):
        run_job(load_job(None, input="in.jsonl", output="out.jsonl", **choices))
    assert happened == ["checked", "asked"]


@pytest.mark.parametrize("how", ["is not there", "cannot be imported", "hangs", "has that option", "is no JSON"])
def test_what_vllm_does_not_refuse_here_is_left_to_workers(vllm, how, monkeypatch):
    options = {"max_modle_len": 512}
    if how == "is no JSON":
        job = load_job(None, input="in", output="out", backend="vllm", model="m", engine_options={"dtype": b"x"})
        LaterChecks([job], print).settle()
        return
    if how == "is not there":
        shutil.rmtree(vllm)
        importlib.invalidate_caches()
    elif how == "cannot be imported":
        (vllm / "__init__.py").write_text("raise ImportError('libcudart.so.12')")
    elif how == "hangs":
        (vllm / "__init__.py").write_text("import time; time.sleep(1_000_000)")
        monkeypatch.setattr(vllm_options, "_CHECK_SECONDS", 0.1)
    else:
        options = {}
    check_options_apart(options)
