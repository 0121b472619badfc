"""What a server's command becomes, and which commands are refused where they are written."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.errors import UsageError
from ctxflow.models.server_command import option_words, read_command

_PLACES = {"model": "M", "socket": "/s/api.sock", "port": "7", "key_file": "/s/key.yaml", "folder": "/s"}


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("llama-server", {"model": "x"}, "llama-server --model M --host /s/api.sock -lv 2"),
        ("/opt/bin/llama-server -lv 3", {}, "/opt/bin/llama-server -lv 3 --host /s/api.sock"),
        ("llama-server --hf-repo a/b", {"socket": ""}, "llama-server --hf-repo a/b --host 127.0.0.1 --port 7"),
        ("vllm serve", {"model": "x"}, "vllm serve M --uds /s/api.sock"),
        ("vllm serve --seed 1", {"model": "x"}, "vllm serve M --seed 1 --uds /s/api.sock"),
        ("env A=1 vllm serve a/b", {}, "env A=1 vllm serve a/b --uds /s/api.sock"),
        ("python3 -m vllm.entrypoints.openai.api_server", {"model": "x"}, "--model M --uds /s/api.sock"),
        ("python -m sglang.launch_server", {"model": "x"}, "M --host 127.0.0.1 --port 7 --config /s/key.yaml"),
        ("text-generation-launcher", {"model": "x"}, "--model-id M --hostname 127.0.0.1 --port 7"),
        ("mine --at {socket} {model}", {"model": "x"}, "mine --at /s/api.sock M"),
        ("mine {port} --key={key_file}", {}, "mine 7 --key=/s/key.yaml"),
        ("mine", {"port": "--port {port}", "key": "MY_KEY"}, "mine --port 7"),
        (["mine", "a b"], {"socket": "--uds={socket}"}, "mine 'a b' --uds=/s/api.sock"),
        ("mine {socket}", {"options": {"some": [1, 2], "j": {"a": "{x}"}}}, "--some 1 2 -j '{\"a\": \"{x}\"}'"),
        ("wrapped serve", {"kind": "vllm", "model": "x"}, "wrapped serve M --uds /s/api.sock"),
    ],
)  # fmt: skip
def test_commands_become_what_their_servers_read(command, settings, expected):
    got = read_command(command, **settings).filled(_PLACES)
    words = shlex.split(expected)
    start = next(at for at in range(len(got)) if got[at : at + len(words)] == words)
    assert start == 0 or not expected.startswith(("llama", "vllm", "mine", "env", "wrapped", "/opt"))


@pytest.mark.parametrize(
    ("command", "settings", "sentence"),
    [
        ("", {}, "is empty"),
        ("llama-server 'x", {"model": "x"}, "split into words"),
        (["llama-server", 4], {}, "give texts only"),
        ("llama-server --host 0.0.0.0", {"model": "x"}, "leave --host out"),
        ("vllm serve a/b --port=80", {}, "leave --port out"),
        ("vllm serve a/b --api-key=x", {}, "all users of the machine could read"),
        ("llama-server --api_key x", {"model": "x"}, "all users of the machine could read"),
        ("vllm serve", {"model": "x", "options": {"api_key": "x"}}, "all users of the machine could read"),
        ("vllm serve", {"model": "x", "options": {"port": 80}}, "leave --port out"),
        ("llama-server -m {model}", {}, "no model= is given"),
        ("mine {socket}", {"model": "x"}, "write {model} into its command"),
        ("mine", {}, "where to listen"),
        ("mine --port {port}", {}, "how it gets a key"),
        ("mine --port {prot}", {"key": "KEY"}, "did you mean port"),
        ("mine --port {port} {sokcet}", {"key": "KEY"}, "did you mean socket"),
        ("mine {socket}", {"kind": "lama-server"}, "did you mean 'llama-server'"),
        ("mine {socket}", {"options": {"--": 1}}, "give its name"),
        ("mine {socket}", {"unresponsive_seconds": 1}, "5 or more"),
    ],
)
def test_a_wrong_command_is_told_in_a_sentence(command, settings, sentence):
    with pytest.raises((UsageError, ValueError)) as caught:
        read_command(command, **settings)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_keys_reach_the_server_past_its_command_line():
    vllm = read_command("vllm serve a/b", socket="")
    own = {"VLLM_RPC_BASE_PATH": "/s", "TMPDIR": "/s"}
    assert vllm.environment(_PLACES, "secret") == {**own, "VLLM_API_KEY": "secret"}
    sglang = read_command("python -m sglang.launch_server --model-path a/b")
    assert sglang.environment(_PLACES, "secret") == {} and sglang.key_text == "api-key: {key}\n"
    assert read_command("mine {socket}", env={"A": "{folder}/a"}).environment(_PLACES, "s") == {"A": "/s/a"}


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{1,8}", fullmatch=True), st.integers() | st.text() | st.booleans()))
def test_each_option_becomes_one_flag(options):
    words = option_words(options)
    flags = [f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in options.items()]
    values = [str(value) for value in options.values() if not isinstance(value, bool)]
    assert sorted(words) == sorted(flags + values)
