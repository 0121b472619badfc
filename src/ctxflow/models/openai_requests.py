"""Which requests of OpenAI's form an engine is given, and why it is not given others. Pure.

A body's fields pass as they are if they are in the table here, with values that an engine can take without reading a
file, fetching an address, or loading what the job does not name; whatever is not in the table is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ctxflow.models.openai_contents import messages_problem, shown, text_problem, without_empty
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS
from ctxflow.models.openai_schemas import constraint_problem, format_problem, tools_problem
from ctxflow.models.results import LARGEST, RANGES

BACKENDS = ("transformers", "vllm", "server")
_ALL = frozenset(BACKENDS)
_ENGINES = frozenset({"vllm", "server"})
_SERVER = frozenset({"server"})

Check = Callable[[Any], str | None]  # Says what is wrong with a value, None if nothing is.


class RequestField(NamedTuple):
    """A field that a body may have.

    :ivar backends: those that can do it.
    :ivar check: says what is wrong with a value.
    :ivar neutral: values that change nothing, so that any backend takes them.
    :ivar whole: whether it is a whole number, which may be written as 3.0.
    """

    backends: frozenset[str]
    check: Check
    neutral: tuple[Any, ...] = ()
    whole: bool = False


MOST_TOKENS = 2**20
"""More tokens than any model knows: the numbers of tokens that requests may name, where a model's own are not known."""

COMPLETION_TOKENS = 16
"""How many tokens a completion has at most that says nothing of it, as OpenAI's API has it."""

_MOST_ANSWERS = 2048  # Of a request: texts, times its n.
_MOST_LOGPROBS = 2_000_000  # Of a request's answers, each of which takes hundreds of bytes.
_MOST_STOPS, _MOST_WORDS, _LONGEST_TEXT = 100, 1000, 256
_MOST_FORBIDDEN = 10_000  # Words that are kept out of a request's answers, all together, at each step.


def _count(
    backends: frozenset[str], least: float, most: float = LARGEST, neutral: tuple[Any, ...] = ()
) -> RequestField:
    """Return a field that is a whole number."""
    wanted = f"give a whole number from {int(least)} to {int(most)}"

    def check(value: Any) -> str | None:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return None if whole and not isinstance(value, bool) and least <= value <= most else wanted

    return RequestField(backends, check, neutral, whole=True)


def _number(least: float, most: float, *, above: bool = False) -> Check:
    wanted = f"give a number {'over' if above else 'from'} {least:g} to {most:g}"

    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return wanted
        return None if least <= value <= most and not (above and value == least) else wanted

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "give true or false"


def _only(*values: Any) -> Check:
    def check(value: Any) -> str | None:
        return None if any(type(value) is type(each) and value == each for each in values) else "leave it out"

    return check


def _one_of(*values: str) -> Check:
    return lambda value: None if isinstance(value, str) and value in values else f"give one of {', '.join(values)}"


def _texts(most: int) -> Check:
    """Return the check of texts that are looked for in an answer, at each token of it."""

    def check(value: Any) -> str | None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
            return "give a string or a list of strings, none of them empty"
        few = len(texts) <= most and all(len(each) <= _LONGEST_TEXT for each in texts)
        return None if few else f"give at most {most:,} strings, of at most {_LONGEST_TEXT} characters each"

    return check


def _ids(value: Any) -> str | None:
    right = isinstance(value, list) and len(value) <= MOST_TOKENS
    right = right and all(type(each) is int and each >= 0 for each in value)
    return None if right else "give a list of tokens' numbers"


def _few_ids(value: Any) -> str | None:
    few = isinstance(value, list) and len(value) <= _MOST_WORDS
    return _ids(value) if few else f"give a list of at most {_MOST_WORDS:,} tokens' numbers"


def _bias(value: Any) -> str | None:
    wanted = f"give an object of at most {_MOST_WORDS:,} tokens' numbers, each with a number from -100 to 100"
    if not isinstance(value, Mapping) or len(value) > _MOST_WORDS:
        return wanted
    amount = _number(-100, 100)
    wrong = any(not _TOKEN.fullmatch(str(token)) or amount(each) for token, each in value.items())
    return wanted if wrong else None


_TOKEN = re.compile("[0-9]{1,9}")


def _named_tokens(endpoint: str, body: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the tokens that a body names by numbers, with what names them."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        if body.get(name):
            yield f"the body's {name}", body[name]
    if body.get("logit_bias"):
        yield "the body's logit_bias", [int(token) for token in body["logit_bias"]]
    contents = CONTENTS[endpoint]
    given = body.get(contents)
    for tokens in [given, *given] if isinstance(given, list) and endpoint != CHAT else []:
        if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
            yield contents, tokens


# What `apply_chat_template` and engines take beside a template's own variables.
_NO_VARIABLES = {
    "chat_template", "tokenize", "tokenizer_kwargs", "template", "conversation", "tools", "documents", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "processor_kwargs",
    "add_generation_prompt", "continue_final_message", "images", "videos", "audio",
}  # fmt: skip
_LOADING = ("load_", "video_", "image_", "audio_", "sampling_rate", "num_frames")


def _variables(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        return "give an object of the template's variables, by their names"
    for name in value:
        if name in _NO_VARIABLES or name.startswith(_LOADING):
            return f"{name!r} is no variable of a template that a request may set: leave it out"
    return None


_SAMPLING = {
    "max_tokens": _count(_ALL, *RANGES["max_new_tokens"][:2]),
    "temperature": RequestField(_ALL, _number(*RANGES["temperature"][:2])),
    "top_p": RequestField(_ALL, _number(*RANGES["top_p"][:2], above=True)),
    "top_k": _count(_ALL, -1, RANGES["top_k"].most),
    "seed": _count(_ALL, *RANGES["seed"][:2]),
    "stop": RequestField(_ALL, _texts(_MOST_STOPS)),
    "n": _count(_ALL, 1, 128),
    "presence_penalty": RequestField(_ENGINES, _number(-2, 2), (0,)),
    "frequency_penalty": RequestField(_ENGINES, _number(-2, 2), (0,)),
    "repetition_penalty": RequestField(_ENGINES, _number(0.001, 1000), (1,)),
    "min_p": RequestField(_ENGINES, _number(0, 1), (0,)),
    "logit_bias": RequestField(_ENGINES, _bias, ({},)),
    "response_format": RequestField(_ALL, format_problem, ({"type": "text"},)),
    "min_tokens": _count(_ENGINES, 0, neutral=(0,)),
    "ignore_eos": RequestField(_ENGINES, _flag, (False,)),
    "stop_token_ids": RequestField(_ENGINES, _few_ids, ([],)),
    "include_stop_str_in_output": RequestField(_ENGINES, _flag, (False,)),
    "bad_words": RequestField(_ENGINES, _texts(_MOST_WORDS), ([],)),
    "allowed_token_ids": RequestField(_ENGINES, _ids),
    "skip_special_tokens": RequestField(_ENGINES, _flag, (True,)),
    "prompt_logprobs": _count(_ENGINES, 0, 20),
    "return_token_ids": RequestField(_ENGINES, _flag, (False,)),
    "return_tokens_as_token_ids": RequestField(_ENGINES, _flag, (False,)),
    "add_special_tokens": RequestField(_ENGINES, _flag),
    "best_of": _count(_SERVER, 1, 128, (1,)),
    "stream": RequestField(frozenset(), _only(False), (False,)),
}

FIELDS: dict[str, dict[str, RequestField]] = {
    CHAT: {
        **_SAMPLING,
        "max_completion_tokens": _count(_ALL, *RANGES["max_new_tokens"][:2]),
        "logprobs": RequestField(_ALL, _flag, (False,)),
        "top_logprobs": _count(_ALL, 0, 20, (0,)),
        "tools": RequestField(_ENGINES, tools_problem, ([],)),
        "tool_choice": RequestField(_ENGINES, lambda value: None, ("none",)),
        "parallel_tool_calls": RequestField(_ENGINES, _flag, (True,)),
        "reasoning_effort": RequestField(_ENGINES, _one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
        "include_reasoning": RequestField(_ENGINES, _flag, (True,)),
        "thinking_token_budget": _count(_ENGINES, -1),
        "chat_template_kwargs": RequestField(_ALL, _variables, ({},)),
        "add_generation_prompt": RequestField(_ENGINES, _flag, (True,)),
        "continue_final_message": RequestField(_ENGINES, _flag, (False,)),
        "modalities": RequestField(frozenset(), _only(["text"]), (["text"],)),
    },
    COMPLETIONS: {
        **_SAMPLING,
        "max_tokens": _count(_ALL, 0, *RANGES["max_new_tokens"][1:2]),
        "logprobs": _count(_ALL, 0, 20, (False,)),
        "echo": RequestField(_ENGINES, _flag, (False,)),
        "suffix": RequestField(_SERVER, lambda value: None if isinstance(value, str) else "give a string", ("",)),
    },
    EMBEDDINGS: {
        "dimensions": _count(_ENGINES, 1),
        "encoding_format": RequestField(_ALL, _one_of("float", "base64"), ("float",)),
    },
}
"""What a body may have beside its contents, by endpoint."""

CONTENTS = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}
"""The field that holds what a request is about, by endpoint."""

TURNING_OFF = frozenset({"repetition_penalty", "min_tokens", "bad_words", "logit_bias"})
"""Fields whose neutral values turn off what a model's own generation settings ask, with the backend transformers."""

_NO_SETTINGS = frozenset({"best_of", "suffix"})
"""Fields that no model or server sets otherwise, so that a neutral value need not be sent."""

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "safety_identifier", "prediction", "verbosity",
})  # fmt: skip
"""Fields that say nothing about the answer, or what none but OpenAI's own models heed, and go to no engine."""

# Ways in which engines wrote, and write, what an answer is bound to.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_CONSTRAINED = {"json": _ALL, "regex": _ALL, "choice": _ALL, "json_object": _ALL, "grammar": _ENGINES}

_LOADS = "would have an engine load what the job does not name: leave it out"
_FETCHES = "would have an engine fetch or read what is not in the request: leave it out"
_HAZARDS = {
    **dict.fromkeys(("chat_template", "tool_prompt"), "is a template, and the job's model has its own: leave it out"),
    **dict.fromkeys(("lora", "lora_path", "lora_request", "adapter", "adapter_id", "adapters"),
                    "names no adapter of this job: give --adapter NAME=PATH, and the request's model its NAME"),
    **dict.fromkeys(("prompt_embeds", "input_embeds", "logits_processors", "custom_logit_processor", "vllm_xargs",
                     "mm_processor_kwargs", "media_io_kwargs", "multi_modal_data", "structural_tag"), _LOADS),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "web_search_options", "bootstrap_host", "image_data",
                     "audio_data", "video_data", "images", "files", "file_ids"), _FETCHES),
}  # fmt: skip
_REFUSED = {
    **_HAZARDS,
    "stream_options": "is for answers that are streamed, and a batch's come whole: leave it out",
    "functions": "is OpenAI's earlier way to write tools: write tools",
    "function_call": "is OpenAI's earlier way to write tool_choice: write tool_choice",
    "moderation": "asks for OpenAI's own moderation, which no backend has: leave it out",
    "audio": "asks for speech, and a batch's answers are text: leave it out",
}  # fmt: skip


def refusal(
    endpoint: str,
    body: Mapping[str, Any],
    backend: str,
    names: Collection[str] | None = None,
    vocabulary: int = MOST_TOKENS,
) -> str | None:
    """Return why a request goes to no engine, in a sentence that says what to change; None if it may.

    What it returns None for neither has an engine read a file, fetch an address, nor load an adapter, template or
    tensor that the job does not name; and the backend can do it.

    :param endpoint: one of `FIELDS`.
    :param body: plain JSON data.
    :param backend: one of `BACKENDS`.
    :param names: what the body's "model" may be, the job's model and its adapters; None where it is ignored.
    :param vocabulary: how many tokens the model knows.

    >>> hello = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "logprobs": True}
    >>> refusal("/v1/chat/completions", hello, "transformers")
    >>> refusal("/v1/chat/completions", {**hello, "min_p": 0.1}, "transformers")
    "the body's min_p = 0.1 is not for the backend transformers: run it with --backend vllm or --backend server"
    """
    contents = CONTENTS[endpoint]
    wrong = _CHECKS[endpoint](body.get(contents), contents, backend)
    for name, value in body.items():
        if wrong is not None:
            return wrong
        if name != contents and name not in IGNORED and value is not None:
            wrong = (
                None if _is_best_of_all(name, value, body) else _field_problem(endpoint, name, value, backend, names)
            )
    return wrong or _together(endpoint, body) or _unknown_token(endpoint, body, vocabulary)


def hazard(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """Return why no server is to get a request, whatever else it knows; None if it may.

    What is asked for would have it read a file, fetch an address, or load an adapter, template or tensor.

    >>> hazard("/v1/completions", {"prompt": "One", "my_servers_own": 1})
    >>> hazard("/v1/completions", {"prompt": "One", "lora_path": "/tmp/a"}).partition(":")[0]
    "the body's lora_path = '/tmp/a' names no adapter of this job"
    """
    contents = CONTENTS[endpoint]
    wrong = None
    if body.get(contents) is not None:
        wrong = _CHECKS[endpoint](body[contents], contents, "server")
    for name, value in body.items():
        if wrong is None and value is not None and name in _HAZARDS:
            wrong = f"the body's {name} = {shown(value)} {_HAZARDS[name]}"
        elif wrong is None and value is not None and name == "chat_template_kwargs":
            wrong = _variables(value)
    return wrong


def _field_problem(endpoint: str, name: str, value: Any, backend: str, names: Collection[str] | None) -> str | None:
    def said(why: str) -> str:
        return f"the body's {name} = {shown(value)} {why}"

    if (wrong := text_problem(value, f"the body's {name}")) is not None:
        return wrong
    if name == "model":
        if names is None or (isinstance(value, str) and value in names):
            return None
        return said(f"is neither the job's model nor one of its adapters: there are {', '.join(sorted(names))}")
    if name in _GUIDED or name == "structured_outputs":
        if endpoint == EMBEDDINGS:
            return said("is for answers of text: leave it out")
        wrong = _constraints(name, value, backend)
        return None if wrong is None else said(wrong)
    if name in _REFUSED:
        return said(_REFUSED[name])
    field = FIELDS[endpoint].get(name)
    if field is None:
        return said("is not known, and nothing is passed on unknown: leave it out")
    if _is_neutral(value, field):
        return None
    if (wrong := field.check(value)) is not None:
        return said(f"is not supported: {wrong}")
    return None if backend in field.backends else said(_other_backend(field.backends, backend))


def _is_neutral(value: Any, field: RequestField) -> bool:
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in field.neutral)


def _other_backend(able: Collection[str], backend: str) -> str:
    others = " or ".join(f"--backend {each}" for each in BACKENDS if each in able)
    return f"is not for the backend {backend}: " + (f"run it with {others}" if others else "leave it out")


def _constraints(name: str, value: Any, backend: str) -> str | None:
    """Return what is wrong with what an answer is bound to, in any of the ways to write it."""
    parts = {_GUIDED[name]: value} if name in _GUIDED else value
    if not isinstance(parts, Mapping):
        return f"is not supported: give an object with one of {', '.join(_CONSTRAINED)}"
    parts = {kind: each for kind, each in parts.items() if each is not None}
    for kind, each in parts.items():
        if kind not in _CONSTRAINED:
            return f"is not supported: {kind!r} is none of {', '.join(_CONSTRAINED)}"
        if (wrong := constraint_problem(kind, each)) is not None:
            return f"is not supported: {wrong}"
        if backend not in _CONSTRAINED[kind]:
            return _other_backend(_CONSTRAINED[kind], backend)
    return None if len(parts) == 1 else f"is not supported: give one of {', '.join(_CONSTRAINED)}"


def _unknown_token(endpoint: str, body: Mapping[str, Any], vocabulary: int) -> str | None:
    """Return which of the tokens that a body names by their numbers is none: some engines end at it, for all rows."""
    for what, tokens in _named_tokens(endpoint, body):
        if (largest := max(tokens)) >= vocabulary:
            return f"{what} has the token {largest}, and the model knows {vocabulary:,}: leave it out"
    return None


def bound_by(body: Mapping[str, Any]) -> list[str]:
    """Return the fields by which a body binds its answer."""
    bound = [name for name in (*_GUIDED, "structured_outputs") if body.get(name) is not None]
    return bound + ["response_format"] * (body.get("response_format") not in (None, {"type": "text"}))


def _together(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with fields that depend on each other."""
    return _answers_problem(endpoint, body) or _logged_problem(endpoint, body) or _binding_problem(body)


def _texts_of(endpoint: str, body: Mapping[str, Any]) -> int:
    given = body.get(CONTENTS[endpoint])
    return len(given) if isinstance(given, list) and endpoint != CHAT and type(given[0]) is not int else 1


def _answers_problem(endpoint: str, body: Mapping[str, Any]) -> str | None:
    answers, best = body.get("n") or 1, body.get("best_of")
    if (seed := body.get("seed")) is not None and seed + answers - 1 > RANGES["seed"].most:
        return f"the body's n = {shown(answers)} answers have seeds from {seed} on, beyond 64 bits: give a smaller seed"
    if body.get("max_tokens") == 0 and not body.get("echo"):
        return "the body's max_tokens = 0 asks for no answer: give 1 or more, or echo = true for the prompt alone"
    if best is not None and best < answers:
        return f"the body's best_of = {shown(best)} is less than its n = {shown(answers)}: leave best_of out"
    written = int(max(answers, best or 1)) * _texts_of(endpoint, body)
    if written > _MOST_ANSWERS:
        return f"the body asks for {shown(written)} answers: give {_MOST_ANSWERS:,} at most, of several requests"
    for name in ("bad_words", "stop_token_ids"):
        if written * len(body.get(name) or ()) > _MOST_FORBIDDEN:
            return (
                f"the body's {name} are too many: give {_MOST_FORBIDDEN // written:,} at most for {written:,} answers"
            )
    return None


def _logged_problem(endpoint: str, body: Mapping[str, Any]) -> str | None:
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    answers = (body.get("n") or 1) * _texts_of(endpoint, body)
    wrong = logprobs_problem(body, int(limits[0] * answers)) if limits else None
    return wrong or _prompt_logprobs_problem(endpoint, body)


def _binding_problem(body: Mapping[str, Any]) -> str | None:
    bound = bound_by(body)
    if len(bound) > 1:
        return f"the body binds its answer twice, by {bound[0]} and by {bound[1]}: leave one out"
    if body.get("top_logprobs") and body.get("logprobs") is not True:
        return "the body's top_logprobs needs logprobs = true beside it"
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return None
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if not names:
        return f"the body's tool_choice = {shown(choice)} needs tools beside it"
    if isinstance(choice, Mapping) and choice.get("type") == "function" and set(choice) == {"type", "function"}:
        function = choice["function"]
        if isinstance(function, Mapping) and set(function) == {"name"} and function["name"] in names:
            return None
        return f"the body's tool_choice = {shown(choice)} names none of its tools: give one of {', '.join(names)}"
    if choice in ("auto", "required"):
        return None
    return f"the body's tool_choice = {shown(choice)} is not supported: give none, auto, required or a function"


def longest_logged(body: Mapping[str, Any]) -> int:
    """Return how many tokens the answers of a chat may have, so that a machine holds the log-probabilities it asks for.

    >>> longest_logged({"logprobs": True, "top_logprobs": 19, "n": 2}), longest_logged({}) == LARGEST
    (50000, True)
    """
    logged = _logged(body) * (body.get("n") or 1)
    return _MOST_LOGPROBS // logged if logged else LARGEST


def _logged(body: Mapping[str, Any]) -> int:
    """Return how many log-probabilities there are to be of each token."""
    asked: Any = body.get("logprobs") or 0
    top: Any = (body.get("top_logprobs") or 0) if asked is True else asked
    return int(1 + top) if asked else 0


def _prompt_logprobs_problem(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """Return that a body asks for more log-probabilities of what is read than a machine may hold."""
    asked: Any = body.get("prompt_logprobs")
    if asked is None and body.get("echo"):
        asked = body.get("logprobs") or None
    if asked is None:
        return None
    given: Any = body.get(CONTENTS[endpoint])
    if isinstance(given, list) and endpoint != CHAT and not any(isinstance(each, str) for each in given):
        tokens = sum(len(each) if isinstance(each, list) else 1 for each in given)
    else:
        tokens = len(json.dumps(given)) // 2  # Of two characters, as a rule of more.
    if tokens * (1 + int(asked)) <= _MOST_LOGPROBS:
        return None
    what = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "logprobs with echo"
    return f"the body's {what} are too many for what is to be read: give {_MOST_LOGPROBS:,} at most in all"


def logprobs_problem(body: Mapping[str, Any], tokens: int) -> str | None:
    """Return that a body asks for more log-probabilities than a machine may hold, of answers of so many tokens."""
    if tokens * _logged(body) <= _MOST_LOGPROBS:
        return None
    return (
        f"the body asks for log-probabilities of up to {tokens:,} tokens: give at most {_MOST_LOGPROBS:,} in all, by "
        "max_tokens, n or top_logprobs"
    )


def _prompt_problem(value: Any, what: str, backend: str) -> str | None:
    """Return what is wrong with a text, or several; with tokens' numbers in the place of texts, or of one."""
    if isinstance(value, str):
        return text_problem(value, what)
    if not isinstance(value, list) or not value:
        return f"{what} is {shown(value)}, not text"
    tokens = all(isinstance(each, list) and each and _ids(each) is None for each in value) or _ids(value) is None
    if not tokens:
        for number, each in enumerate(value):
            if not isinstance(each, str):
                return f"{what}[{number}] is {shown(each)}, not text"
            if (wrong := text_problem(each, f"{what}[{number}]")) is not None:
                return wrong
    if backend == "transformers" and (tokens or (what == "prompt" and len(value) > 1)):
        return f"the body's {what} of {'tokens' if tokens else 'several texts'} {_other_backend(_ENGINES, backend)}"
    return None


_CHECKS: dict[str, Callable[[Any, str, str], str | None]] = {
    CHAT: lambda value, what, backend: messages_problem(value, what, media=backend in _ENGINES),
    COMPLETIONS: _prompt_problem,
    EMBEDDINGS: _prompt_problem,
}


def as_sent(endpoint: str, body: Mapping[str, Any], backend: str, adapters: Collection[str] = ()) -> dict[str, Any]:
    """Return what an engine gets of a body that `refusal` has nothing against.

    It begins with the contents. "model" stays only where it names an adapter, and what answers are bound to is written
    in one way: "response_format", or "structured_outputs" with "json", "regex", "choice" or "grammar".

    >>> as_sent("/v1/completions", {"model": "m", "prompt": "One", "guided_regex": "a+", "user": "u"}, "vllm")
    {'prompt': 'One', 'structured_outputs': {'regex': 'a+'}}
    """
    contents = CONTENTS[endpoint]
    given = without_empty(body[contents]) if endpoint == CHAT else body[contents]
    alone = backend == "transformers" and endpoint == COMPLETIONS and isinstance(given, list)
    sent = {contents: given[0] if alone else given}
    for name, value in body.items():
        if name == contents or name in IGNORED or value is None or (name == "model" and value not in list(adapters)):
            continue
        if name in _GUIDED:
            sent["structured_outputs"] = {_GUIDED[name]: value}
        elif name == "structured_outputs":
            sent[name] = {kind: each for kind, each in value.items() if each is not None}
        elif not (
            _says_nothing(name, FIELDS[endpoint].get(name), value, backend) or _is_best_of_all(name, value, body)
        ):
            sent[name] = _as_written(name, FIELDS[endpoint].get(name), value, backend)
    return sent


def _as_written(name: str, field: RequestField | None, value: Any, backend: str) -> Any:
    if field is not None and field.whole and isinstance(value, float):
        value = int(value)
    return max(value, 0) if name == "top_k" and backend == "transformers" else value


def _says_nothing(name: str, field: RequestField | None, value: Any, backend: str) -> bool:
    """Return whether a field can be left out: it changes nothing, and is empty or not for the backend."""
    if backend == "transformers" and name in TURNING_OFF:
        return False
    if field is None or not _is_neutral(value, field):
        return False
    return value in ([], {}) or name in _NO_SETTINGS or backend not in field.backends


def _is_best_of_all(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    return name == "best_of" and type(value) is int and value == (body.get("n") or 1)


_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# The values that changed nothing for the ctxflow that knew requests in its own form.
_NEUTRAL_BEFORE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "logprobs": (False,), "echo": (False,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "response_format": ({"type": "text"},),
    "encoding_format": ("float",), "suffix": ("",), "tool_choice": ("none",),
}  # fmt: skip


def as_before(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form by which a row is known in a job's journal: that of version 0.1, in which jobs go on.

    >>> as_before({"prompt": "One", "max_tokens": 5, "stop": "x", "n": 1, "min_p": 0.1})
    {'prompt': 'One', 'max_new_tokens': 5, 'stop': ['x'], 'min_p': 0.1}
    """
    known: dict[str, Any] = {}
    for name, value in body.items():
        if value not in _NEUTRAL_BEFORE.get(name, ()):
            known[_NAMES.get(name, name)] = [value] if name == "stop" and isinstance(value, str) else value
    return known
