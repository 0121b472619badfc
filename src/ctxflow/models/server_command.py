"""What starts a server: its command with the places filled in, where it listens, and how it gets its key.

Nothing is started here, so that a wrong command is told where it was written, before a worker is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import UsageError, closest, short
from ctxflow.option_values import number

PLACES = ("model", "socket", "port", "key_file", "folder")
"""What a command, and the settings with arguments, may name in braces."""

_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclasses.dataclass(frozen=True)
class ServerKind:
    """What is known of a server's program. Arguments are written as in a shell, with `PLACES` in braces.

    :ivar programs: the programs, or modules behind `python -m`, by which it is recognised.
    :ivar model: arguments that name the model, for commands that do not.
    :ivar socket: arguments with which it listens at a UNIX socket; "" if it cannot.
    :ivar port: arguments with which it listens at a port of the loopback interface.
    :ivar key: the environment variable that it reads its key from, or arguments that name a file with it.
    :ivar key_text: what that file holds.
    :ivar health: the path that answers 200 once it can serve.
    :ivar more: options that a command gets unless it has them.
    :ivar env: environment variables that it gets.
    :ivar ours: options that a command must not have, since they say where it listens, and to whom.
    :ivar ignores_model: whether it answers requests for a model that it has not as if they were for the one it has.
    """

    name: str
    programs: tuple[str, ...] = ()
    model: str = ""
    socket: str = ""
    port: str = ""
    key: str = ""
    key_text: str = "{key}\n"
    health: str = "/health"
    more: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ours: tuple[str, ...] = ()
    ignores_model: bool = False


KINDS = (
    ServerKind(
        "llama-server",
        ("llama-server",),
        model="--model {model}",
        socket="--host {socket}",
        port="--host 127.0.0.1 --port {port}",
        key="LLAMA_API_KEY",
        more="-lv=2",  # Each request is eight lines of its log otherwise.
        ours=("--host", "--port", "--api-key", "--api-key-file", "--reuse-port", "--api-prefix"),
        ignores_model=True,
    ),
    ServerKind(
        "vllm",
        ("vllm", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"),
        model="--model {model}",
        socket="--uds {socket}",
        port="--host 127.0.0.1 --port {port}",
        key="VLLM_API_KEY",
        more="--disable-uvicorn-access-log --enable-prompt-tokens-details",
        # Sockets between its processes, which trust whoever connects; and files by which these find each other.
        env={"VLLM_RPC_BASE_PATH": "{folder}", "TMPDIR": "{folder}"},
        ours=("--host", "--port", "--uds", "--api-key", "--root-path"),
    ),
    ServerKind(
        "sglang",
        ("sglang.launch_server", "sglang"),
        model="--model-path {model}",
        port="--host 127.0.0.1 --port {port}",
        key="--config {key_file}",
        key_text="api-key: {key}\n",
        ours=("--host", "--port", "--api-key", "--config"),
    ),
    ServerKind(
        "tgi",
        ("text-generation-launcher",),
        model="--model-id {model}",
        port="--hostname 127.0.0.1 --port {port}",
        key="API_KEY",
        env={"SHARD_UDS_PATH": "{folder}/shard"},
        ours=("--hostname", "--port", "-p", "--api-key", "--shard-uds-path"),
    ),
)
"""The servers that are recognised by their programs."""


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """A command that was checked, and what is known of its server.

    :ivar arguments: the command with its places still open.
    :ivar at_socket: whether it listens at a UNIX socket, and not at a port.
    :ivar key: how it gets its key, as in `ServerKind`.
    :ivar unresponsive_seconds: see `ctxflow.models.server`.
    """

    name: str
    arguments: tuple[str, ...]
    at_socket: bool
    key: str
    key_text: str
    health: str
    env: Mapping[str, str]
    unresponsive_seconds: float
    ignores_model: bool

    def filled(self, places: Mapping[str, str]) -> list[str]:
        """Return the command with its places filled in."""
        return [_filled(argument, places) for argument in self.arguments]

    def environment(self, places: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the variables that the server gets beside its parent's, its key among them if it is read there."""
        own = {name: _filled(value, places) for name, value in self.env.items()}
        return {**own, **({self.key: key} if self.key and not _has_places(self.key) else {})}


def read_command(
    command: str | Sequence[str],
    *,
    model: str | os.PathLike[str] | None = None,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    socket: str | None = None,
    port: str | None = None,
    key: str | None = None,
    health: str | None = None,
    env: Mapping[str, str] | None = None,
    unresponsive_seconds: float = 60.0,
) -> ServerCommand:
    """Check a command and its settings; what they mean is said at `ctxflow.models.server`.

    :raises UsageError: for what cannot be started, or not safely, saying what to write.

    >>> read_command("llama-server -lv 3", model="tiny.gguf").arguments[3:]
    ('--model', '{model}', '--host', '{socket}')
    >>> read_command("vllm serve {model}", model="tiny", options={"max_model_len": 512}).arguments[:5]
    ('vllm', 'serve', '{model}', '--max-model-len', '512')
    """
    words = _words("the server's command", command)
    if not words:
        raise UsageError("the server's command is empty: give a program, such as 'llama-server --model {model}'")
    known = _kind(words, kind)
    changes: dict[str, Any] = {"socket": socket, "port": port, "key": key, "health": health}
    known = dataclasses.replace(known, **{name: text for name, text in changes.items() if text is not None})
    _check_places(words)
    words += option_words(options or {})
    _refuse_ours(words, known)
    words = _insert_model(words, known, model)
    written = {name for word in words for name in _PLACE.findall(word)}
    if "socket" not in written and "port" not in written:
        where = known.socket or known.port
        if not where:
            raise UsageError(
                f"nothing says how {known.name} is told where to listen: write {{socket}} or {{port}} into its "
                "command, or give socket='--uds {socket}' or port='--port {port}'"
            )
        words += _words("socket=" if known.socket else "port=", where)
    words += _more(words, known)
    named = _words("key=", known.key) if _has_places(known.key) else []
    words += named if "key_file" not in written else []
    written = {name for word in words for name in _PLACE.findall(word)}
    at_socket = "socket" in written
    if not at_socket and not known.key and "key_file" not in written:
        raise UsageError(
            f"whoever is on the machine could use {known.name} at its port: say how it gets a key, as key='API_KEY' "
            "(an environment variable) or key='--api-key-file {key_file}', or how it listens at a UNIX socket"
        )
    return ServerCommand(
        known.name, tuple(words), at_socket, known.key, known.key_text, known.health, {**known.env, **(env or {})},
        number("unresponsive_seconds", unresponsive_seconds, "seconds, 5 or more", 5.0), known.ignores_model,
    )  # fmt: skip


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return a server's options as words of its command.

    True gives the option alone, False its opposite ("--no-..."), None nothing; a list several words; a dict JSON.

    >>> option_words({"ctx_size": 4096, "jinja": True, "mmap": False, "hf_overrides": {"a": 1}, "t": 2})
    ['--ctx-size', '4096', '--jinja', '--no-mmap', '--hf-overrides', '{"a": 1}', '-t', '2']
    """
    words: list[str] = []
    for name, value in options.items():
        plain = str(name).lstrip("-").replace("_", "-")
        if not plain:
            raise UsageError(f"an option of the server is called {short(name)}: give its name, such as 'ctx-size'")
        option = f"-{plain}" if len(plain) == 1 else f"--{plain}"
        if value is False:
            words.append(f"--no-{plain}")
        elif value is not None:
            words.append(option)
            if isinstance(value, Mapping):
                words.append(json.dumps(value))
            elif isinstance(value, (list, tuple)):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
    return words


def _words(what: str, command: str | Sequence[str]) -> list[str]:
    if isinstance(command, str):
        try:
            return shlex.split(command)
        except ValueError as error:
            raise UsageError(
                f"{what} {short(command)} cannot be split into words ({error}): close its quotes"
            ) from None
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise UsageError(f"{what} has {short(wrong[0])} among its words: give texts only, as '4096'")
    return words


def programs_of(words: Sequence[str]) -> Iterator[str]:
    """Yield what a command's program may be called, behind `env` and its variables too, or `python -m`."""
    rest = list(words)
    while rest and (os.path.basename(rest[0]) == "env" or "=" in rest[0]):
        rest = rest[1:]
    if rest:
        yield os.path.basename(rest[0])
        if is_python(rest[0]) and "-m" in rest[:-1]:
            yield rest[rest.index("-m") + 1]


def is_python(program: str) -> bool:
    """Return whether a program is called as Python's interpreter is."""
    return bool(re.match(r"python[\d.]*$", os.path.basename(program)))


def _kind(words: Sequence[str], name: str | None) -> ServerKind:
    names = {each.name: each for each in KINDS}
    if name is not None and name != "other":
        if name not in names:
            meant = closest(name, names)
            hint = f"did you mean {meant!r}?" if meant else f"give one of {', '.join(names)}, or 'other'"
            raise UsageError(f"kind={name!r} is no kind of server that is known: {hint}")
        return names[name]
    programs = list(programs_of(words))
    found = next((each for each in KINDS if name is None and set(each.programs) & set(programs)), None)
    return found or ServerKind(programs[0] if programs else words[0])


def _refuse_ours(words: Sequence[str], kind: ServerKind) -> None:
    for word in words:
        option = word.partition("=")[0]
        if option.replace("_", "-") in kind.ours:  # Most take names with either stroke.
            others = "which all users of the machine could read" if "key" in option else "which ctxflow chooses"
            raise UsageError(f"leave {option} out of {kind.name}'s command, {others}")


def _more(words: Sequence[str], kind: ServerKind) -> list[str]:
    given = {word.partition("=")[0] for word in words}
    more = (word.split("=", 1) for word in _words("more", kind.more))
    return [part for parts in more if parts[0] not in given for part in parts]


def find_program(name: str, environment: Mapping[str, str]) -> str:
    """Return where a program is: as a shell finds it, or beside this Python."""
    if os.sep in name:
        return name
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return shutil.which(name, path=environment.get("PATH")) or (beside if os.access(beside, os.X_OK) else name)


def _insert_model(words: list[str], kind: ServerKind, model: object) -> list[str]:
    named = any("{model}" in word for word in words)
    if model is None:
        if named:
            raise UsageError("the command names {model}, and no model= is given: give a path, or a name on the hub")
        return words
    if named:
        return words
    if kind.name == "vllm" and "serve" in words:
        at = words.index("serve") + 1
        return [*words[:at], "{model}", *words[at:]]
    if not kind.model:
        raise UsageError(f"nothing says how {kind.name} is told its model: write {{model}} into its command")
    return [*words, *_words("model", kind.model)]


def _check_places(words: Sequence[str]) -> None:
    for word in words:
        for place in _PLACE.findall(word):
            if place not in PLACES:
                meant = closest(place, PLACES) or ", ".join(PLACES)
                raise UsageError(f"the command names {{{place}}}, which nothing fills in: did you mean {meant}?")


def _has_places(text: str) -> bool:
    return bool(_PLACE.search(text))


def _filled(text: str, places: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda found: places.get(found[1], found[0]), text)
