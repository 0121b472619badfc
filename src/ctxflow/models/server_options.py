"""Ask a server's program, where it is installed, which options it has: a wrong one is told before a worker is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable

from ctxflow.errors import UsageError, closest
from ctxflow.models.server_command import ServerCommand, find_program, is_python

_HELP = {"llama-server": ("--help",), "vllm": ("--help=all",), "text-generation-launcher": ("--help",)}
SLOW = ("vllm",)
"""Kinds of servers whose programs take long to tell which options they have."""
_HELP_SECONDS = 120.0
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")
_known: dict[tuple[str, ...], frozenset[str]] = {}  # What programs told, for jobs of several models.


def check_options(command: ServerCommand, told: Callable[[str], None] = lambda text: None) -> None:
    """Refuse options that the server's program does not have, if it is installed here and tells which it has.

    This starts the program for its help: a moment for llama-server, ten seconds and more for vLLM.

    :param told: takes a sentence before what takes long.
    :raises UsageError: for an option that it does not have, with the one that may have been meant.
    """
    asked = _HELP.get(command.name)
    given = enumerate(zip(("", *command.arguments), command.arguments, strict=False))
    # Behind python it names the module.
    first = next((at for at, (last, word) in given if word[:1] == "-" and not (word == "-m" and is_python(last))), None)
    words = [word for word in command.arguments[:first] if "{" not in word]
    if first is None or asked is None or shutil.which(program := find_program(words[0], os.environ)) is None:
        return
    words = [program, *words[1:], *asked]
    if tuple(words) not in _known:
        if command.name in SLOW:
            told(f"asking {command.name} which options it has, while workers are asked for")
        _known[tuple(words)] = _options_in_help(words)
    known = _known[tuple(words)]
    for word in command.arguments[first:] if known else ():
        option = _plain(word)
        if _OPTION.fullmatch(option) and not option[1:].isdigit() and option not in known:
            meant = closest(option, known)
            hint = f": did you mean {meant}?" if meant else ": see its --help"
            raise UsageError(f"{command.name} has no option {option}{hint}")


def _options_in_help(words: list[str]) -> frozenset[str]:
    """Return the options that a program tells in its help; none if it tells nothing."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=_HELP_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(map(_plain, _OPTION.findall(done.stdout))) if done.returncode == 0 else frozenset()


def _plain(word: str) -> str:
    """Return an option without its value, as all programs take it; vLLM takes names with either stroke, and parts."""
    option = word.partition("=")[0].partition(".")[0]
    return f"--{option[2:].replace('_', '-')}" if option.startswith("--") else option
