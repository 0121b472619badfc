"""The options of vLLM: checked by vLLM's own parser of arguments, without a model, and told in our words.

They are those of `vllm serve` but for its web server: the engine's (`max_model_len`, `enforce_eager`, `dtype`, ...) and
those of its answers (`chat_template`, `tool_call_parser`, `reasoning_parser`, ...).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ctxflow.errors import UsageError, closest, short
from ctxflow.host.linux import die_with_parent
from ctxflow.models.results import MissingPackageError
from ctxflow.topology.machine import declared_share

_OURS = {
    "model": "give the model as the context's first parameter",
    "lora_modules": 'give adapters={"NAME": FOLDER}',
    "enable_log_requests": "it would print every row; leave it out",
}
"""Options that are given otherwise, or not at all."""
_DEFAULTS = {"disable_log_stats": True, "enable_prompt_tokens_details": True}
_PLAIN = (bool, int, float, str, list, tuple, Mapping)
_MEANINGS = {
    "invalid human_readable_int": "it takes a whole number, or text such as 4k",
    "invalid int value": "it takes a whole number",
    "invalid float value": "it takes a number",
    "ignored explicit argument": "it takes true or false",
}
_CHECK_SECONDS = 300.0  # For an import of vLLM, on a busy machine or from a slow disk.
_WRONG = "ctxflow found wrong: "  # Begins the line of `answer_check`.
_NAMELESS = re.compile(r"^argument [^:]*: ")
_WORDS = {"true": True, "false": False}


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Check options of vLLM by name and type, before a model is read; this needs vLLM, and takes its time of import.

    :param options: by names as of `vllm serve`, with _ or -; values as JSON has them, or as text of the command line.
    :raises MissingPackageError: where vLLM is not installed.
    :raises ctxflow.errors.UsageError: in one sentence, for an option that vLLM does not have, with the nearest name
        that it has, or that cannot have that value.
    """
    parse_options("model", options)


def check_options_apart(options: Mapping[str, Any]) -> None:
    """Check options as `check_vllm_options` in a process of its own: importing vLLM takes 20 s of a core, and 540 MB.

    What keeps it from an answer, such as a vLLM that cannot be imported, is left to workers to tell.

    :param options: as JSON has them.
    :raises ctxflow.errors.UsageError: as `check_vllm_options`.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    program = (  # Not from the current directory.
        "import sys; sys.path[:] = filter(None, sys.path); "
        "from ctxflow.models.vllm_options import answer_check; answer_check()"
    )
    given = json.dumps({"parent": os.getpid(), "options": dict(options)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            check=False, timeout=_CHECK_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return
    for line in done.stdout.splitlines():  # Among what vLLM prints.
        if line.startswith(_WRONG) and (wrong := json.loads(line.removeprefix(_WRONG))):
            raise UsageError(*wrong)


def answer_check() -> None:
    """Be the process of `check_options_apart`: print what is wrong with the options that come on stdin."""
    given = json.load(sys.stdin)
    die_with_parent(given["parent"])
    wrong: list[str] = []
    try:
        check_vllm_options(given["options"])
    except UsageError as error:
        wrong = list(error.args)
    sys.stdout.write(f"\n{_WRONG}{json.dumps(wrong)}\n")


def plain_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the names that vLLM's arguments have, however they are spelled.

    >>> plain_names({"--max-model-len": 4096, "dtype": "float16"})
    {'max_model_len': 4096, 'dtype': 'float16'}
    """
    return {_plain_name(spelled): value for spelled, value in options.items()}


def _plain_name(spelled: object) -> str:
    return str(spelled).strip().lstrip("-").replace("-", "_")


DEFAULT_SHARE = 0.9
"""Of a GPU's memory, which vLLM takes where nothing is said; it starts with no more than is free."""


def memory_share(options: Mapping[str, Any]) -> dict[str, float]:
    """Return vLLM's option by which it takes of each GPU what its context declares, unless the option is given."""
    if options.get("gpu_memory_utilization") or options.get("kv_cache_memory_bytes"):
        return {}
    share = declared_share()
    return {} if share is None or not 0 < share < DEFAULT_SHARE else {"gpu_memory_utilization": share}


def parse_options(model: str, options: Mapping[str, Any]) -> argparse.Namespace:
    """Return vLLM's arguments for a model, as its own parser makes them; parameters and errors as the above."""
    parser, known = _parser()
    given: dict[str, Any] = dict(_DEFAULTS)
    for spelled, value in options.items():
        name = _plain_name(spelled)
        if name in _OURS:
            raise UsageError(f"vLLM's option {name} cannot be given here: {_OURS[name]}")
        if name not in known:
            meant = closest(name, known)
            hint = f"did you mean {meant}?" if meant else "`vllm serve --help=all` lists them"
            raise UsageError(f"vLLM has no option {spelled}: {hint}")
        if value is not None:
            given[name] = value
    if given.get("tool_call_parser"):
        given.setdefault("enable_auto_tool_choice", True)
    if given.get("structured_outputs_config") is None:
        given["structured_outputs_config"] = _binding(given)
    objects = {name: value for name, value in given.items() if not isinstance(value, _PLAIN)}
    plain = {name: value for name, value in given.items() if name not in objects}
    for name, value in plain.items():  # One by one, so that the message names what is wrong.
        _parsed(parser, list(_words(known[name], name, value)), name, value)
    words = [word for name, value in plain.items() for word in _words(known[name], name, value)]
    arguments = _parsed(parser, [f"--model={model}", *words], "options", plain)
    for name, value in objects.items():  # Objects of vLLM's own, which a program may give.
        setattr(arguments, name, value)
    _check_parsers(arguments)
    return arguments


def _binding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how answers are bound: by guidance, which knows most of JSON schemas, but not most forms of tool calls.

    Left to itself ("auto") vLLM takes one library for all requests, by the first that binds its answer, and passes over
    what that one cannot do in later ones. White space is left out of JSON, of which models write without end.
    """
    if not given.get("tool_call_parser"):
        return {"backend": "guidance", "disable_any_whitespace": True}
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(given["tool_call_parser"])
    except KeyError:  # A plug-in's, or none: that is told later.
        return {"backend": "auto"}
    if getattr(parser, "structural_tag_model", None):
        return {"backend": "xgrammar", "disable_any_whitespace": True}
    return {"backend": "auto"}


class _Refused(Exception):
    pass


def _parser() -> tuple[Any, dict[str, argparse.Action]]:
    """Return a parser of all options, and each by its name."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise MissingPackageError.about("vllm", extra="vllm", why=error) from error

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise _Refused(message)

    parser = AsyncEngineArgs.add_cli_args(BaseFrontendArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False)))
    return parser, {action.dest: action for action in parser._actions if action.option_strings}


def _words(action: argparse.Action, name: str, value: Any) -> Iterator[str]:
    """Yield an option as the words of a command line that say it."""
    flag = f"--{name.replace('_', '-')}"
    if action.nargs == 0:
        wanted = _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
        if not isinstance(wanted, bool):
            yield f"{flag}={value}"  # Which the parser refuses.
        elif wanted:
            yield flag
        elif f"--no-{name.replace('_', '-')}" in action.option_strings:
            yield f"--no-{name.replace('_', '-')}"
    elif isinstance(value, (list, tuple)) and action.nargs in ("+", "*"):
        yield flag
        yield from (each if isinstance(each, str) else json.dumps(each) for each in value)
    elif isinstance(value, (list, tuple, Mapping)):
        yield f"{flag}={json.dumps(value)}"
    else:
        yield f"{flag}={value}"


def _parsed(parser: Any, words: list[str], name: str, value: Any) -> argparse.Namespace:
    try:
        arguments: argparse.Namespace = parser.parse_args(words)
    except (_Refused, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"vLLM's option {name} cannot be {short(value)}: {_plainly(str(error))}") from None
    return arguments


def _plainly(message: str) -> str:
    """Return what a parser says as one sentence, without the names of its functions and addresses of manuals.

    >>> _plainly("argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'")
    'it takes a whole number, or text such as 4k'
    """
    text = " ".join(message.split()).partition(" For further information")[0]
    text = re.sub(r" \[type=[^\]]*\]$", "", _NAMELESS.sub("", text))
    for sign, meaning in _MEANINGS.items():
        if sign in text:
            return meaning
    return text


def _check_parsers(arguments: argparse.Namespace) -> None:
    """Refuse the names of parsers that vLLM does not have, which it would tell only when the model is loaded."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers.chat_utils import validate_chat_template
    from vllm.tool_parsers import ToolParserManager

    if arguments.tool_parser_plugin:
        ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
    if getattr(arguments, "reasoning_parser_plugin", ""):
        ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
    for name, manager in (("tool_call_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        chosen, known = getattr(arguments, name, None), list(manager.list_registered())
        if chosen and chosen not in known:
            meant = closest(chosen, known)
            hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(known))}"
            raise UsageError(f"vLLM's option {name} cannot be {chosen!r}: {hint}")
    if arguments.enable_auto_tool_choice and not arguments.tool_call_parser:
        raise UsageError("vLLM's option enable_auto_tool_choice needs tool_call_parser, the model's form of tool calls")
    try:
        validate_chat_template(arguments.chat_template)
    except Exception as error:  # Not a ValueError, in newer versions.
        raise UsageError(f"vLLM's option chat_template is no template: {_plainly(str(error))}") from None
