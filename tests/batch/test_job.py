import pytest

from ctxflow.batch.job import Job, load_job
from ctxflow.sites import load_site

LEAST = {"input": "in.jsonl", "output": "out.jsonl", "model": "m"}


def test_flags_come_before_the_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('input = "a.csv"\noutput = "b.jsonl"\nmodel = "m"\nseed = 1\nstop = ["x"]\ntask = "chat"\n')
    job = load_job(file, output="c.jsonl", seed=None, stop=[], top_k=5)
    assert (str(job.input), str(job.output), job.columns) == ("a.csv", "c.jsonl", ("messages",))
    assert job.parameters == {"seed": 1, "stop": ("x",), "top_k": 5}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input": None}, "a job needs its input"),
        ({"model": None}, "needs a model or a function"),
        ({"function": "m:f"}, "and not both"),
        ({"model": None, "function": "m:f", "task": "chat"}, "decides itself"),
        ({"task": "classify", "label": ["a"]}, "two labels or more"),
        ({"label": ["a", "b"]}, "give --task classify"),
        ({"task": "classify", "label": ["a", "b"], "backend": "vllm"}, "chosen by transformers alone"),
        ({"backend": "server"}, "give --server-command"),
        ({"server_command": "llama-server"}, "a command is for --backend server"),
        ({"backend": "server", "server_command": "vllm serve", "dtype": "float32"}, "as its own command says"),
        ({"backend": "vllm", "task": "embed", "too_long": "cut-start"}, "are of whole inputs"),
        ({"adapter": {"a": "b"}}, "adapters are for --backend vllm"),
        ({"model": None, "function": "m:f", "engine_options": {"a": 1}}, "a function has its own context"),
        ({"system": "x"}, "give --task chat"),
        ({"column": ["a", "b"]}, "one text of several with --template"),
        ({"column": ["a"], "template": "x"}, "leave --column out"),
        ({"constants": {"a": 1}}, "constants are a function's"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"workers": 0}, "workers cannot be 0"),
        ({"task": "dance"}, "task cannot be 'dance'"),
        ({"row_parameter": ["heat"]}, "row_parameter cannot be 'heat'"),
        ({"row_parameter": ["seed"], "keep": ["seed"]}, "both kept and a parameter"),
        ({"temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_what_makes_no_sense_is_told(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_job(None, **{**LEAST, **changes})


def test_files_that_are_no_job_are_told(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_job(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text("input =")
    with pytest.raises(ValueError, match="is not TOML"):
        load_job(tmp_path / "job.toml")


def test_the_identity_is_of_what_results_depend_on(tmp_path):
    (tmp_path / "t.j2").write_text("{{ a }}")
    job = Job(**LEAST, template=f"@{tmp_path}/t.j2")
    for free in ({"workers": 3}, {"site": "x.toml"}, {"order": "input"}, {"batch_size": 2}, {"output": "o"}):
        assert job.model_copy(update=free).identity() == job.identity()
    assert job.model_copy(update={"template": "{{ a }}"}).identity() == job.identity()
    for bound in ({"seed": 3}, {"template": "{{ b }}"}, {"model": "n"}, {"keep": ("a",)}, {"dtype": "float64"}):
        assert job.model_copy(update=bound).identity() != job.identity()


def test_a_job_that_says_nothing_of_an_engine_is_what_it_was_before():
    job = Job(**LEAST)
    later = {"engine_options": {"max_model_len": 5}, "server_command": "vllm serve", "adapter": {"a": "b"}}
    assert not set(later) & set(job.identity())
    for name, value in later.items():
        assert job.model_copy(update={name: value}).identity()[name] == value


def test_a_job_file_has_tables_of_options_and_adapters(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(
        'input = "a"\noutput = "b"\nmodel = "m"\nbackend = "vllm"\n[engine_options]\nmax_model_len = 512\n'
        'enforce_eager = true\n[adapter]\nfrench = "adapters/fr"\n'
    )
    job = load_job(file)
    assert job.engine_options == {"max_model_len": 512, "enforce_eager": True}
    assert job.adapter == {"french": "adapters/fr"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_that_people_write_may_have_byte_order_marks(tmp_path, encoding):
    (tmp_path / "job.toml").write_bytes('input = "é.csv"\r\noutput = "out"\r\nmodel = "m"\r\n'.encode(encoding))
    (tmp_path / "job.json").write_bytes('{"input": "é.csv", "output": "out", "model": "m"}'.encode(encoding))
    for name in ("job.toml", "job.json"):
        assert str(load_job(tmp_path / name).input) == "é.csv"
    (tmp_path / "site.toml").write_bytes('name = "é"\r\n'.encode(encoding))
    assert load_site(tmp_path / "site.toml").name == "é"
