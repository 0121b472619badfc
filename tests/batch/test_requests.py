import pytest

from ctxflow import batch_app
from ctxflow.batch import row_items
from ctxflow.batch.job import Job
from ctxflow.batch.row_items import function_maker, known_as, maker, openai_maker, plain_maker
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS
from ctxflow.rows.source import RowError


def job(**choices):
    return Job(**{"input": "in", "output": "out", "model": "m", **choices})


def openai(body, url=CHAT, task="chat", choices=None, **more):
    return openai_maker(job(task=task, **(choices or {})))({"custom_id": "a", "url": url, "body": body, **more})


HELLO = [{"role": "user", "content": "hello"}]


def test_openai_requests():
    body = {"model": "x", "messages": HELLO, "n": 1, "stream": False, "user": None}
    assert openai(body) == ((CHAT, {"messages": HELLO, "n": 1}),)
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "stop": "x"}
    assert openai(body) == ((CHAT, body),)
    assert known_as(openai(body)) == ({"messages": HELLO, "max_new_tokens": 5, "temperature": 0.5, "stop": ["x"]},)
    assert openai({"prompt": "a", "max_tokens": 1}, COMPLETIONS) == ((COMPLETIONS, {"prompt": "a", "max_tokens": 1}),)
    assert openai({"input": ["a", "b"]}, EMBEDDINGS, "embed") == ({"input": ["a", "b"]},), "of a batch"
    vllm = {"backend": "vllm"}
    assert openai({"input": "a"}, EMBEDDINGS, "embed", vllm) == ((EMBEDDINGS, {"input": "a"}),)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert openai({"messages": parts}) == ((CHAT, {"messages": parts}),)


def test_a_schema_binds_requests_that_bind_themselves_to_nothing_and_call_nothing():
    asked = {"answer_schema": '{"type": "object"}', "backend": "vllm"}
    function = {"type": "function", "function": {"name": "look"}}
    assert "response_format" in openai({"messages": HELLO}, choices=asked)[0][1]
    for body in ({"tools": [function]}, {"tools": [function], "tool_choice": "auto"}, {"guided_regex": "a"}):
        assert "response_format" not in openai({"messages": HELLO, **body}, choices=asked)[0][1]


def test_requests_are_for_the_jobs_backend_and_adapters():
    adapters = {"backend": "vllm", "model": "some/base", "adapter": {"french": "/adapters/fr"}}
    assert openai({"messages": HELLO, "model": "french"}, choices=adapters) == (
        (CHAT, {"messages": HELLO, "model": "french"}),
    )
    for name in ("base", "some/base"):
        assert openai({"messages": HELLO, "model": name}, choices=adapters) == ((CHAT, {"messages": HELLO}),)
    with pytest.raises(RowError, match="neither the job's model nor one of its adapters: there are base, french, some"):
        openai({"messages": HELLO, "model": "dutch"}, choices=adapters)
    choice = {"messages": HELLO, "guided_choice": ["a", "b"]}
    llama = {"backend": "server", "server_command": "llama-server -m {model}"}
    assert openai(choice, choices=llama) == ((CHAT, {"messages": HELLO, "grammar": 'root ::= "a" | "b"'}),)
    with pytest.raises(RowError, match="llama-server binds no answer by regex: run it with --backend vllm or"):
        openai({"messages": HELLO, "guided_regex": "a"}, choices=llama)
    with pytest.raises(RowError, match="llama-server passes over dimensions = 5"):
        openai({"input": "a", "dimensions": 5}, EMBEDDINGS, "embed", llama)
    tgi = {"backend": "server", "server_command": "env A=1 text-generation-launcher"}
    with pytest.raises(RowError, match="tgi binds no answer by choice"):
        openai(choice, choices=tgi)
    vllm = {"backend": "server", "server_command": "vllm serve {model} --chat-template /opt/llama-server"}
    assert openai(choice, choices=vllm) == ((CHAT, {"messages": HELLO, "structured_outputs": {"choice": ["a", "b"]}}),)


def test_a_server_is_told_which_model_a_request_is_for():
    server = {"backend": "server", "server_command": "vllm serve {model} --enable-lora", "model": "some/base"}
    assert openai({"messages": HELLO, "model": "french"}, choices=server)[0][1]["model"] == "french"
    for name in ("base", "some/base", None):
        assert openai({"messages": HELLO, "model": name}, choices=server) == ((CHAT, {"messages": HELLO}),)


@pytest.mark.parametrize(
    ("body", "more", "sentence"),
    [
        (None, {}, "no body that is an object"),
        ({"messages": HELLO}, {"method": "GET"}, "only POST"),
        ({"messages": HELLO}, {"url": "/v1/images"}, "the url is '/v1/images'"),
        ({"messages": HELLO}, {"url": ["/v1/images"]}, "the url is"),
        ({"input": "a"}, {"url": "/v1/embeddings"}, "but this job is to generate"),
        ({}, {}, "messages is missing, not a list of messages"),
        ({"messages": []}, {}, "not a list of messages"),
        ({"messages": ["hello"]}, {}, r"messages\[0\] is no message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {},
            "an image that is missing",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, {}, r"the content of messages\[0\] is 5, not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, {}, "no valid Unicode"),
        ({"messages": HELLO, "n": 0}, {}, "n = 0 is not supported"),
        ({"messages": HELLO, "tools": [{}]}, {}, "tools = .* is not supported"),
        ({"messages": HELLO, "min_p": 0.1}, {}, "min_p = 0.1 is not for the backend transformers: run it with"),
        ({"messages": HELLO, "max_tokens": 0}, {}, "max_tokens = 0 is not supported: give a whole number from 1"),
        ({"messages": HELLO, "temperature": "hot"}, {}, "temperature = 'hot' is not supported: give a number from 0"),
        ({"messages": HELLO, "stop": {"a": 1}}, {}, "stop = .*: give a string or a list of strings"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(body, more, sentence):
    with pytest.raises(RowError, match=sentence):
        openai(body, **more)


def test_plain_rows():
    assert plain_maker(job(task="generate"))({"prompt": "a"}) == ((COMPLETIONS, {"prompt": "a"}),)
    assert plain_maker(job(task="embed", column=("t",)))({"t": "a"}) == ({"input": "a"},), "of a batch"
    assert plain_maker(job(task="embed", backend="vllm"))({"text": "a"}) == ((EMBEDDINGS, {"input": "a"}),)
    assert plain_maker(job(task="classify", label=("a", "b")))({"text": "a"}) == ({"prompt": "a"},), "of a batch"
    assert plain_maker(job(task="chat"))({"messages": HELLO}) == ((CHAT, {"messages": HELLO}),)
    make = plain_maker(job(task="chat", template="{{ q }}?", system="Be {{ how }}"))
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello?"}]
    assert make({"q": "hello", "how": "brief"}) == ((CHAT, {"messages": messages}),)
    make = plain_maker(job(task="chat", column=("q",), system="Be brief"))
    assert make({"q": HELLO}) == ((CHAT, {"messages": [{"role": "system", "content": "Be brief"}, *HELLO]}),)


def test_parameters_by_row():
    make = plain_maker(job(task="generate", row_parameter=("seed", "max_new_tokens", "stop")))
    made = make({"prompt": "a", "seed": "7", "max_new_tokens": "5", "stop": '["x"]'})
    assert made == ((COMPLETIONS, {"prompt": "a", "seed": 7, "max_tokens": 5, "stop": ["x"]}),)
    assert repr(known_as(made)) == repr(({"prompt": "a", "seed": 7, "max_new_tokens": 5, "stop": ["x"]},))
    made = make({"prompt": "a", "seed": "", "max_new_tokens": None, "stop": "x"})
    assert made == ((COMPLETIONS, {"prompt": "a", "stop": ["x"]}),)
    assert make({"prompt": "a"}) == ((COMPLETIONS, {"prompt": "a"}),), "as documented: what is missing is the flag's"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"seed": "many", "max_new_tokens": 1, "stop": None}, "seed='many' is a str"),
        ({"temperature": "-1"}, "temperature=-1"),
        ({"stop": "5"}, "stop is 5: give a string or a list of strings"),
    ],
)
def test_what_is_wrong_with_a_rows_parameter_is_told(values, sentence):
    make = plain_maker(job(task="generate", row_parameter=tuple(values)))
    with pytest.raises(RowError, match=sentence):
        make({"prompt": "a", **values})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"text": "a"}, "the row has no 'prompt': it has 'text'"),
        ({}, "it has nothing"),
        ({"prompt": 5}, "prompt is 5, not text"),
        ({"prompt": None}, "prompt is missing, not text"),
        ({"prompt": "\udcff"}, "no valid Unicode: character 0"),
    ],
)
def test_what_is_wrong_with_a_plain_row_is_told(values, sentence):
    with pytest.raises(RowError, match=sentence):
        plain_maker(job(task="generate"))(values)


@batch_app
def one(rows):
    return rows


@batch_app
def two(first, second, *, between=" "):
    return first


def function(app, known=None, **choices):
    return function_maker(Job(input="in", output="out", function="m:f", **choices), app, known)


def test_what_functions_get():
    values = {"first": 1, "second": 2, "third": 3}
    assert function(one)(values) == (values,)
    assert function(one, ("first", "second"))(values) == (values,)
    assert function(one, ("first", "rows"))({"rows": 4, "first": 1}) == (4,)
    assert function(one, column=("third",))(values) == (3,)
    assert function(one, template="{{ first }}+{{ second }}")(values) == ("1+2",)
    assert function(two)(values) == (1, 2)
    assert function(two, column=("third", "first"))(values) == (3, 1)
    with pytest.raises(RowError, match="the row has no 'second'"):
        function(two)({"first": 1})
    with pytest.raises(ValueError, match=r"takes 2 values an item \(first, second\), but gets 1"):
        function(two, column=("third",))


@pytest.mark.parametrize("kind", [RuntimeError, RecursionError, AssertionError, MemoryError])
@pytest.mark.parametrize("name", ["refusal", "as_sent", "cell"])
def test_an_unforeseen_error_at_a_rows_own_values_is_that_rows(monkeypatch, name, kind):
    def planted(*given):
        raise kind("planted")

    chosen = {"task": "generate"} if name == "cell" else {"task": "chat", "input_format": "openai"}
    make = maker(job(**chosen), None)
    values = {"prompt": "a", "url": CHAT, "body": {"messages": HELLO}}
    assert make(values)
    monkeypatch.setattr(row_items, name, planted)
    with pytest.raises(RowError, match=rf"the row cannot be used \({kind.__name__}: planted\): mend it"):
        make(values)


@pytest.mark.parametrize(
    "url",
    [
        "/v1/chat/completions/",
        "https://api.openai.com/v1/chat/completions",
        "http://localhost:8000/v1/chat/completions/",
    ],
)
def test_a_url_may_have_a_host_and_a_slash_at_its_end(url):
    assert openai({"messages": HELLO}, url) == ((CHAT, {"messages": HELLO}),)
    with pytest.raises(RowError, match="the url is"):
        openai({"messages": HELLO}, url.replace("chat", "chats"))


def test_tokens_are_those_of_the_jobs_model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    (tmp_path / "model.safetensors").touch()
    for model, known in ((str(tmp_path), 300), ("m", 2**20)):
        choices = {"backend": "vllm", "model": model}
        assert openai({"prompt": [known - 1]}, COMPLETIONS, choices=choices)
        with pytest.raises(RowError, match=f"the token {known}, and the model knows {known:,}"):
            openai({"prompt": [known]}, COMPLETIONS, choices=choices)
