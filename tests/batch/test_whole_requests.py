"""Whole requests, with any fields of any types, nested and at their ends, from a line to its result.

Whatever a row brings, it costs that row alone: those beside it are answered as without it, by the same context.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import read_lines, write_lines
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
pytest.importorskip("aiohttp")

from ctxflow.batch import load_job, work
from ctxflow.batch.driver import run_job
from ctxflow.batch.engine_answers import schema_missed
from ctxflow.batch.job import Job
from ctxflow.batch.pump import memory_of
from ctxflow.batch.records import Held, openai_record
from ctxflow.batch.row_items import Prepared, asked_of, known_as, openai_maker
from ctxflow.errors import ItemRefused
from ctxflow.models.answering import respond
from ctxflow.models.openai_engine import CHAT, COMPLETIONS
from ctxflow.models.openai_requests import _GUIDED, _REFUSED, BACKENDS, CONTENTS, FIELDS, IGNORED
from ctxflow.rows.source import RowError
from ctxflow.testing.small_models import make_causal_lm

# --- requests

_NUMBERS = st.sampled_from([
    0, -1, 1, 2, 5, 20, 128, 129, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400,
    0.0, -0.0, 5e-324, 1e-46, 1e-9, 0.5, 1.0, 1.5, 2.0, 3.0, 1e6, 1e38, 1e308, float("inf"), float("nan"),
]) | st.integers() | st.floats()  # fmt: skip
_PATTERNS = st.sampled_from([
    "^(a+)+$", "^(a+)+[[:digit:]]$", r"^\p{L}+$", "(", "a{1000}", "(a{1,900}){1,900}", "[a-c]{2}", "^(?=a)a$",
    "(a|a)*b", "x*" * 30, r"\d{3}-\d{4}", "",
])  # fmt: skip
_TEXTS = st.text(max_size=12) | st.sampled_from([
    "", "a", "\ud800", "\x00", "é" * 300, "<|im_end|>", "a" * 3000, "https://127.0.0.1/x", "/etc/passwd",
    "{{ 7 * 7 }}", "data:image/png;base64,iVBORw0KGgo=", "data:image/gif;base64,R0lGODlhAQABAAAAACw=", "text",
    "required", "low", "base64",
]) | _PATTERNS  # fmt: skip
_SCALARS = st.none() | st.booleans() | _NUMBERS | _TEXTS
_ANY = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


def _deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


_HUGE = st.sampled_from(
    [[{}] * 20_000, ["a"] * 9000, "word " * 4000, list(range(9000)), {str(n): n for n in range(3000)}]
)
_VALUES = _ANY | _HUGE | st.builds(_deep, st.sampled_from([20, 49, 51, 60]))

# Schemas that are some, though engines may find them hard, and such that are none.
_WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
_SMALL = st.integers(0, 5) | st.sampled_from([100, 2**31, 2**63])
_LEAVES = st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"]),
    "pattern": _PATTERNS, "enum": st.lists(_SCALARS, min_size=1, max_size=4), "const": _SCALARS, "minLength": _SMALL,
    "maxLength": _SMALL, "minimum": st.integers() | st.floats(-9, 9), "format": _WORDS,
    "multipleOf": st.sampled_from([1, 3, 0.01, 1e-300]), "maxItems": _SMALL, "minItems": _SMALL,
    "uniqueItems": st.booleans(),
})  # fmt: skip
_SCHEMAS = st.builds(
    lambda schema: {**schema, "$defs": {"a": {"type": "string", "$anchor": "a"}}},
    st.recursive(
        _LEAVES | st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#a"}, {"$ref": "#"}]),
        lambda inner: st.fixed_dictionaries({"type": st.just("object")}, optional={
            "properties": st.dictionaries(_WORDS, inner, max_size=3), "additionalProperties": inner | st.booleans(),
            "patternProperties": st.dictionaries(_PATTERNS, inner, max_size=2), "propertyNames": inner, "not": inner,
            "required": st.lists(_WORDS, max_size=2, unique=True),
        }) | st.fixed_dictionaries({"type": st.just("array")}, optional={
            "items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2), "contains": inner,
        }) | st.builds(lambda kind, several: {kind: several}, st.sampled_from(["anyOf", "oneOf", "allOf"]),
                       st.lists(inner, min_size=1, max_size=3)),
        max_leaves=8,
    ),
) | st.sampled_from([
    {"properties": {f"p{n}": {"$ref": "#a"} for n in range(3000)}, "z": {"$anchor": "a"}},
    {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{(n + 1) % 40}"}] * 2} for n in range(40)}},
    {"enum": [f"choice {n}" for n in range(4000)]}, {"$ref": "https://example.org"}, {"$schema": "x"}, {"type": "any"},
])  # fmt: skip
_CHOICES = st.lists(_WORDS, min_size=1, max_size=4) | st.just([f"choice {n}" for n in range(4000)])
_BINDING = st.one_of(
    st.builds(lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, _SCHEMAS),
    st.just({"response_format": {"type": "json_object"}}),
    st.fixed_dictionaries({"guided_json": _SCHEMAS}),
    st.fixed_dictionaries({"guided_regex": _PATTERNS}),
    st.builds(lambda choices: {"structured_outputs": {"choice": choices, "regex": None}}, _CHOICES),
)
# Values that an engine takes, many of them at their ends.
_TAKEN: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([1, 3, 3.0, 12]), "temperature": st.sampled_from([0, 1e-320, 1e-5, 0.7, 2, 1e6]),
    "top_p": st.sampled_from([5e-324, 1e-46, 0.5, 1]), "top_k": st.sampled_from([-1, 0, 1, 2.0, 2**31 - 1]),
    "n": st.sampled_from([1, 2, 3.0, 9]), "seed": st.sampled_from([0, -(2**63), 2**63 - 9, 7.0]),
    "stop": _WORDS | st.lists(_WORDS, max_size=3) | st.just(["é" * 200] * 90), "user": _ANY, "metadata": _ANY,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "messages", "range", "loop"]), _VALUES),
    "logit_bias": st.just({}), "presence_penalty": st.sampled_from([0, 0.0]), "model": _ANY, "best_of": st.just(1),
}  # fmt: skip
_PARTS = st.builds(lambda text: {"type": "text", "text": text}, _WORDS) | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_audio", "video_url", "refusal", "file"])},
    optional={"text": _TEXTS, "image_url": _ANY, "input_audio": _ANY, "video_url": _ANY, "cache_control": _ANY},
)
_CALLS = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    _WORDS, _WORDS | st.sampled_from(["[" * 5000, '{"a": ' * 90, "{}", '{"a": 1}']) | _ANY,
)  # fmt: skip
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "", "nobody"])},
        optional={
            "content": _WORDS | st.lists(_PARTS, max_size=2), "name": _WORDS, "tool_call_id": _WORDS,
            "tool_calls": st.lists(_CALLS, max_size=2),
        },
    ),
    min_size=1, max_size=3,
)  # fmt: skip
_CONTENTS = {CHAT: _MESSAGES, COMPLETIONS: _WORDS | st.lists(_WORDS, min_size=1, max_size=1) | st.just("word " * 4000)}
_KNOWN = sorted(
    {*_GUIDED, *_REFUSED, *IGNORED, "structured_outputs", *(name for each in FIELDS.values() for name in each)}
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, Any]:
    """An endpoint, and a body with some of the fields that there are: mostly such as are taken."""

    def once_in(times: int) -> bool:
        return draw(st.integers(1, times)) == times

    endpoint = draw(st.sampled_from([CHAT, COMPLETIONS]))
    contents = st.just([{"role": "user", "content": "Is it?"}] if endpoint == CHAT else "The river")
    if not once_in(3):
        contents = _CONTENTS[endpoint]
    body: dict[str, Any] = {CONTENTS[endpoint]: draw(_VALUES if once_in(9) else contents)}
    for name in draw(st.lists(st.sampled_from(sorted(_TAKEN)), max_size=4)):
        if name in FIELDS[endpoint] or name in IGNORED:
            body[name] = draw(_TAKEN[name])
    if once_in(3):
        body |= draw(_BINDING)
    if once_in(4):
        body |= {"logprobs": True, "top_logprobs": 20} if endpoint == CHAT else {"logprobs": draw(st.integers(0, 20))}
    if once_in(4):
        body[draw(st.sampled_from(_KNOWN) | _TEXTS)] = draw(_VALUES)
    return endpoint, body


# --- what it costs

BESIDE = [
    (COMPLETIONS, {"prompt": "number 1", "temperature": 0, "max_tokens": 9}),
    (CHAT, {"messages": [{"role": "user", "content": "a claim"}], "seed": 4, "max_tokens": 7, "temperature": 1}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 20, "guided_regex": "[ab]{3}", "temperature": 1, "seed": 1}),
]


class Asked:
    """An engine that is asked by an event loop in a thread of its own, as in a library process."""

    def __init__(self, start: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.run(start())
        self.alone = self.ask(*BESIDE)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def ask(self, *asked: tuple[str, Any]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            made = (respond(self.engine, each, parameters={"max_tokens": 6}) for each in asked)
            return await asyncio.gather(*made, return_exceptions=True)

        return [_without_names(each) for each in self.run(all_of_them())]

    def close(self) -> None:
        self.run(self.engine.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def _without_names(answer: Any) -> Any:
    return {**answer, "id": "", "created": 0} if isinstance(answer, dict) else answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_causal_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def transformers(model: Path) -> Iterator[Asked]:
    from ctxflow.models.transformers_serving import build_transformers_engine

    asked = Asked(lambda: build_transformers_engine(model, device="cpu", dtype="float64"))
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Asked]:
    from ctxflow.models.openai_server import start_server

    played = Path(__file__).parents[1] / "models" / "played_server.py"
    asked = Asked(lambda: start_server(f"{shlex.join([sys.executable, str(played)])} --socket {{socket}}"))
    yield asked
    asked.close()


def line_of(endpoint: str, body: Any) -> dict[str, Any]:
    return {"custom_id": "drawn", "method": "POST", "url": endpoint, "body": body}


def checked(asked: Asked, backend: str, endpoint: str, body: Any) -> None:
    """Have a drawn request prepared, answered beside others, judged and written."""
    command = {"server_command": "played {socket}"} if backend == "server" else {}
    job = Job(input="in", output="out", model="m", task="chat", input_format="openai", backend=backend, **command)
    try:
        item = openai_maker(job)(line_of(endpoint, body))
    except RowError as error:
        assert str(error) and len(str(error)) < 2000
        return
    assert memory_of(item) > 0 and known_as(item)
    before, drawn, *after = asked.ask(BESIDE[0], item[0], *BESIDE[1:])
    assert [before, *after] == asked.alone
    assert isinstance(drawn, (dict, ItemRefused)), repr(drawn)
    if isinstance(drawn, dict):
        # A request's own stop text may end JSON in its middle.
        assert schema_missed(asked_of(item), drawn) is None or backend == "server" or asked_of(item).get("stop")
        record = openai_record(job, 1)(Prepared(0, 0, "drawn", item, {}, 1), drawn)
        assert Held().line(record).endswith(b"\n")


@settings(max_examples=400)
@given(requests())
@example((COMPLETIONS, {"prompt": "a", "top_k": 2**63}))
@example((COMPLETIONS, {"prompt": "a", "top_p": 1e-46, "temperature": 1}))
@example((COMPLETIONS, {"prompt": "a", "seed": 2**63 - 1, "n": 2}))
@example((COMPLETIONS, {"prompt": "a", "temperature": 10**400}))
@example((COMPLETIONS, {"prompt": ["a"], "max_tokens": 3.0, "suffix": "", "best_of": 1}))
@example((COMPLETIONS, {"prompt": "a", "guided_json": {"$ref": "#"}}))
@example((CHAT, {"messages": [{"role": "user", "content": "a"}], "metadata": _deep(60), "tools": _deep(60)}))
def test_a_request_harms_nobody_beside_it_with_transformers(transformers, request_):
    checked(transformers, "transformers", *request_)


@settings(max_examples=400)
@given(requests())
@example((COMPLETIONS, {"prompt": "a", "stop_token_ids": [2**40]}))
@example((CHAT, {"messages": [{"role": "assistant", "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": "[" * 200_000}}]}]}))  # fmt: skip
def test_a_request_harms_nobody_beside_it_at_a_server(server, request_):
    checked(server, "server", *request_)


@settings(max_examples=200)
@given(requests())
@example((CHAT, {"messages": [{"role": "user", "content": "a"}], "n": ["a"]}))
@example((COMPLETIONS, {"prompt": [], "n": "a"}))
def test_a_server_is_sent_any_request_of_a_program_or_refuses_it(server, request_):
    before, drawn, *after = server.ask(BESIDE[0], request_, *BESIDE[1:])
    assert [before, *after] == server.alone and isinstance(drawn, (dict, ItemRefused)), repr(drawn)


@settings(max_examples=300)
@given(requests(), st.sampled_from(BACKENDS))
def test_preparing_any_request_ends_in_an_item_or_a_sentence(request_, backend):
    endpoint, body = request_
    command = {"server_command": "llama-server -m {model}"} if backend == "server" else {}
    job = Job(input="in", output="out", model="m", task="chat", input_format="openai", backend=backend, **command)
    try:
        item = openai_maker(job)(line_of(endpoint, body))
    except RowError as error:
        assert str(error)
    else:
        assert item[0][0] == endpoint and openai_maker(job)(line_of(endpoint, body)) == item


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(requests(), min_size=12, max_size=20))
def test_a_job_of_any_requests_ends_with_the_context_that_it_began_with(executor, model, tmp_path_factory, drawn):
    folder = tmp_path_factory.mktemp("drawn")
    beside = [line_of(*each) | {"custom_id": f"beside {number}"} for number, each in enumerate(BESIDE)]
    lines = [line_of(*each) | {"custom_id": f"drawn {number}"} for number, each in enumerate(drawn)]
    choices = {"model": str(model), "device": "cpu", "dtype": "float64", "workers": 1, "max_new_tokens": 6}
    found = []
    for name, rows in (("alone", beside), ("with others", [beside[0], *lines, *beside[1:]])):
        write_lines(folder / f"{name}.jsonl", rows)
        before = executor.status()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(work, "BareExecutor", lambda site: contextlib.nullcontext(executor))
            job = load_job(None, input=folder / f"{name}.jsonl", output=folder / f"{name}.out.jsonl", **choices)
            outcome = run_job(job)
        after = executor.status()
        assert outcome.done + outcome.dead == len(rows) and (after.loads, after.crashes) == (
            max(before.loads, 1), before.crashes,
        )  # fmt: skip
        answers = {each["custom_id"]: each["response"]["body"]["choices"] for each in read_lines(job.output)}
        found.append({name: answers[name] for name in sorted(answers) if name.startswith("beside")})
    assert found[0] == found[1] and len(found[0]) == len(BESIDE)
