"""What a model can do, as the files of its folder say: no weights are read, and no model library is imported.

What does not live here: where the folder is (locate.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ctxflow.models.errors import WrongModelError

TASKS = ("generate", "chat", "embed", "classify")

_WRITES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_JUDGES = re.compile(r"For\w*(Classification|Answering|Choice|Prediction|Detection|Segmentation)$")
_SPEAKS = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class Ability(NamedTuple):
    """What a model is.

    :ivar kind: what it is, for messages.
    :ivar tasks: what it can do, of `TASKS`.
    :ivar length: the tokens that it reads and writes together, None if it does not say.
    """

    kind: str
    tasks: tuple[str, ...]
    length: int | None = None


def ability_of(folder: Path) -> Ability:
    """Return what a model's folder says of it; of one that says nothing, all may be possible.

    A model writes if its config.json names an architecture with a language model's head; it chats if it has a chat
    template besides; it embeds if it has the modules.json of a sentence encoder, or no head that does something else.
    """
    config = _read(folder / "config.json")
    names = [str(name) for name in config.get("architectures") or ()]
    text = config.get("text_config")
    length = config.get("max_position_embeddings") or (text or {}).get("max_position_embeddings")
    length = length if isinstance(length, int) and length > 0 else None
    if not names:
        return Ability("a model that does not say what it is", TASKS, length)
    shown, encodes = ", ".join(names), (folder / "modules.json").is_file()
    both = bool(config.get("is_encoder_decoder"))
    own = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    writes = (own or any(_WRITES.search(name) for name in names)) and not both
    speaks = writes and _has_chat_template(folder)
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


def refusal(name: str, ability: Ability, task: str) -> str | None:
    """Return why a model cannot do a task, None if it can.

    :param name: the model's, for the message.

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
    """Refuse a model that cannot do a task.

    :raises WrongModelError: saying what it is, and what it can do.
    """
    if (reason := refusal(name, ability_of(folder), task)) is not None:
        raise WrongModelError(reason)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _SPEAKS):
        return True
    return bool(_read(folder / "tokenizer_config.json").get("chat_template"))


def _read(file: Path) -> Mapping[str, Any]:
    """A file's object; none where there is no such file, which others tell when they need it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
