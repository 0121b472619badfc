"""Check a model before anything loads it: its files, its chat template, and where and in which type it is to be.

Nothing here imports a model library, and no weights are read but the headers of their files.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxflow.models.model_folder import read_json, weight_files

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
"""The types in which transformers' weights are loaded."""

VLLM_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_DEVICES = re.compile(r"(auto|cpu|mps|meta|cuda|xpu|hpu|npu|mtia|xla|privateuseone)(:\d+)?")

_POINTER = b"version https://git-lfs.github.com/spec/"
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "tekken.json", "*.tiktoken", "*.spm")
_WITHOUT_VOCABULARY = {"ByT5Tokenizer", "CanineTokenizer", "MyT5Tokenizer", "PerceiverTokenizer"}
_DESCRIPTIONS = ("config.json", "modules.json", "tokenizer_config.json", "tokenizer.json")
_HEADER_BYTES = 100 << 20  # That the format allows.


def dtype_problem(dtype: str, known: tuple[str, ...] = DTYPES) -> str | None:
    """Return what is wrong with a type of weights by its name, None if nothing is."""
    return None if dtype in known else f"dtype={dtype!r} is unknown: give one of {', '.join(known)}"


def device_problem(device: str) -> str | None:
    """Return what is wrong with a device by its name, None if nothing is.

    >>> device_problem("cuda:1"), device_problem("gpu")
    (None, "device='gpu' is unknown: give auto, cpu, cuda, cuda:1 or mps")
    """
    if _DEVICES.fullmatch(device):
        return None
    return f"device={device!r} is unknown: give auto, cpu, cuda, cuda:1 or mps"


def why_not_loaded(name: str, folder: Path, error: Exception, known: tuple[type[Exception], ...] = ()) -> str | None:
    """Return why a library could not load a model: what is wrong with its files, or what the library says of it.

    :param known: errors beside the usual ones that libraries raise about a model; of others, None if nothing is wrong.
    """
    problem = next(files_problems(name, folder), None)
    if problem is None and isinstance(error, (OSError, ValueError, KeyError, *known)):
        return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    return problem


def files_problems(name: str, folder: Path, *, weights: bool = True, tokenizer: bool = True) -> Iterator[str]:
    """Yield what is wrong with a model's files, a sentence each, most telling first.

    :param name: of the model, for messages.
    :param weights: whether weights are to be there in the forms that transformers reads; others that are there are
        looked at in any case.
    :param tokenizer: whether a tokenizer is to be there.
    """
    modules = [part for part in read_json(folder / "modules.json", []) if isinstance(part, dict)]
    places = dict.fromkeys([folder, *(folder / str(part.get("path", "")) for part in modules)])
    described = [place / each for place in places for each in _DESCRIPTIONS if (place / each).is_file()]
    broken = [problem for each in described if (problem := _description_problem(each)) is not None]
    if broken:
        yield from broken
        return
    reads = _is_transformer(modules)
    if weights and reads and not (folder / "adapter_config.json").is_file():
        yield from _lacking_weights(name, folder)
    for file in weight_files(folder) or [file for kind in _OTHER_WEIGHTS for file in sorted(folder.glob(kind))]:
        if (problem := _weights_problem(file)) is not None:
            yield problem
    if tokenizer and reads and not any(map(_has_tokenizer, places)):
        yield f"the model {name} has no tokenizer: there is no tokenizer.json, or vocabulary, in {folder}"


def _lacking_weights(name: str, folder: Path) -> Iterator[str]:
    if weight_files(folder):
        return
    for index in sorted(folder.glob("*.index.json")):
        parts = read_json(index).get("weight_map")
        missing = sorted({str(part) for part in (parts or {}).values() if not (folder / str(part)).is_file()})
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield f"the model {name} lacks the weights {missing[0]}{more} in {folder}: download it again"
            return
    yield f"the model {name} has no weights: there is no model.safetensors or pytorch_model.bin in {folder}"


def _pointer_problem(file: Path, head: bytes) -> str | None:
    if head.startswith(_POINTER):
        return f"{file} is a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`"
    return None if head else f"{file} is empty: download it again"


def _description_problem(file: Path) -> str | None:
    """Return what is wrong with a file of JSON; of one that may be large, by its ends alone."""
    try:
        with open(file, "rb") as data:
            head = data.read(1 << 20)
            data.seek(max(0, file.stat().st_size - 64))
            end = data.read()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if (problem := _pointer_problem(file, head)) is not None:
        return problem
    text = head.strip()
    whole = text[:1] in (b"{", b"[") and end.rstrip()[-1:] in (b"}", b"]")
    if whole and len(head) < 1 << 20:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            whole = False
    return None if whole else f"{file} is no JSON, or is cut short: download it again"


def _weights_problem(file: Path) -> str | None:
    """Return what is wrong with a file of weights, by its header."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as data:
            head = data.read(200)
            if (problem := _pointer_problem(file, head)) is not None:
                return problem
            if file.suffix == ".safetensors":
                length = int.from_bytes(head[:8], "little")
                data.seek(8)
                header = json.loads(data.read(length)) if length <= min(size, _HEADER_BYTES) else None
                ends = [each["data_offsets"][1] for key, each in (header or {}).items() if key != "__metadata__"]
                whole = header is not None and 8 + length + max(ends, default=0) <= size
            else:
                whole = head[:2] != b"PK" or zipfile.is_zipfile(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        whole = False
    return None if whole else f"{file} holds no weights, or is cut short: download it again"


def _has_tokenizer(place: Path) -> bool:
    about = read_json(place / "tokenizer_config.json")
    if about.get("tokenizer_class") in _WITHOUT_VOCABULARY or about.get("auto_map"):
        return True
    return any(next(place.glob(name), None) is not None for name in _VOCABULARIES)


def _is_transformer(modules: list[dict[str, Any]]) -> bool:
    """Return whether a sentence encoder's first part is a transformer; what is none is a transformer itself."""
    return not modules or str(modules[0].get("type", "")).endswith(".Transformer")


def system_problem(name: str, folder: Path) -> str | None:
    """Return the sentence by which a model's chat template refuses a system message, None if it does not.

    What cannot be determined without the model's library is left to it.
    """
    source = _chat_template(folder)
    if source is None:
        return None
    user = {"role": "user", "content": "Hello"}
    if _refused_by(source, folder, [user]) is not None:  # Whatever is said: that is not the system message's fault.
        return None
    said = _refused_by(source, folder, [{"role": "system", "content": "Hello"}, user])
    if said is None:
        return None
    return (
        f"the chat template of the model {name} refuses the system message of --system ({said}): write its text into "
        "--template"
    )


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for about in (read_json(folder / "tokenizer_config.json"), read_json(folder / "chat_template.json")):
        found = about.get("chat_template")
        if isinstance(found, list):
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


class _RefusedError(Exception):
    """A chat template raised an exception of its own."""


def _refused_by(source: str, folder: Path, messages: list[dict[str, str]]) -> str | None:
    """Return what a chat template says of a conversation that it refuses."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None

    def refuse(message: object) -> None:
        raise _RefusedError(str(message))

    about: Mapping[str, Any] = read_json(folder / "tokenizer_config.json")
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in about.items()
        if name.endswith("_token")
    }
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=True, **tokens)
    except _RefusedError as error:
        return str(error)
    except Exception:  # A template is a program, of what its model's library has.
        return None
    return None
