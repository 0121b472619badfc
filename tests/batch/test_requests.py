import pytest

from ctxflow import batch_app
from ctxflow.batch.job import Job
from ctxflow.batch.job_apps import function_maker, openai_maker, plain_maker
from ctxflow.rows.source import RowError


def job(**choices):
    return Job(**{"input": "in", "output": "out", "model": "m", **choices})


def openai(body, url="/v1/chat/completions", task="chat", **more):
    return openai_maker(job(task=task))({"custom_id": "a", "url": url, "body": body, **more})


HELLO = [{"role": "user", "content": "hello"}]


def test_openai_requests():
    assert openai({"model": "x", "messages": HELLO, "n": 1, "stream": False, "user": None}) == ({"messages": HELLO},)
    assert openai({"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "stop": "x"}) == (
        {"messages": HELLO, "max_new_tokens": 5, "temperature": 0.5, "stop": ["x"]},
    )
    assert openai({"prompt": "a", "max_tokens": 1}, "/v1/completions") == ({"prompt": "a", "max_new_tokens": 1},)
    assert openai({"input": ["a", "b"]}, "/v1/embeddings", "embed") == ({"input": ["a", "b"]},)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert openai({"messages": parts}) == ({"messages": parts},)


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
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "content that is not text"),
        ({"messages": [{"role": "user", "content": 5}]}, {}, r"the content of messages\[0\] is 5, not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, {}, "no valid Unicode"),
        ({"messages": HELLO, "n": 2}, {}, "n = 2 is not supported"),
        ({"messages": HELLO, "tools": [{}]}, {}, "tools = .* is not supported"),
        ({"messages": HELLO, "min_p": 0.1}, {}, "min_p = 0.1 is not supported"),
        ({"messages": HELLO, "max_tokens": 0}, {}, "max_new_tokens=0 is out of range"),
        ({"messages": HELLO, "temperature": "hot"}, {}, "temperature='hot' is a str"),
        ({"messages": HELLO, "stop": {"a": 1}}, {}, "stop is .*: give a string or a list of strings"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(body, more, sentence):
    with pytest.raises(RowError, match=sentence):
        openai(body, **more)


def test_plain_rows():
    assert plain_maker(job(task="generate"))({"prompt": "a"}) == ({"prompt": "a"},)
    assert plain_maker(job(task="embed", column=("t",)))({"t": "a"}) == ({"input": "a"},)
    assert plain_maker(job(task="chat"))({"messages": HELLO}) == ({"messages": HELLO},)
    make = plain_maker(job(task="chat", template="{{ q }}?", system="Be {{ how }}"))
    assert make({"q": "hello", "how": "brief"}) == (
        {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello?"}]},
    )
    make = plain_maker(job(task="chat", column=("q",), system="Be brief"))
    assert make({"q": HELLO}) == ({"messages": [{"role": "system", "content": "Be brief"}, *HELLO]},)


def test_parameters_by_row():
    make = plain_maker(job(task="generate", row_parameter=("seed", "temperature", "stop")))
    assert make({"prompt": "a", "seed": "7", "temperature": "0.5", "stop": '["x"]'}) == (
        {"prompt": "a", "seed": 7, "temperature": 0.5, "stop": ["x"]},
    )
    assert make({"prompt": "a", "seed": "", "temperature": None, "stop": "x"}) == ({"prompt": "a", "stop": ["x"]},)
    assert make({"prompt": "a"}) == ({"prompt": "a"},), "as documented: what is missing is the flag's"
    with pytest.raises(RowError, match="seed='many' is a str"):
        make({"prompt": "a", "seed": "many", "temperature": 0, "stop": None})


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
