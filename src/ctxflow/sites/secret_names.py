"""Which of a site's texts are secrets, as far as their names say. Pure."""

from __future__ import annotations

import re
from typing import Any

_WORDS = r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)"
_NAME = re.compile(rf"{_WORDS}S?(?![A-Z])", re.IGNORECASE)
_GIVEN = re.compile(rf"\b(\w*{_WORDS}S?)(?:=|: )\S", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a variable's name is that of a secret.

    >>> [is_secret(name) for name in ("HF_TOKEN", "api_key", "AWS_SECRET_ACCESS_KEY", "TOKENIZERS_PARALLELISM")]
    [True, True, True, False]
    """
    return bool(_NAME.search(name))


def secrets_in(value: Any) -> list[str]:
    """Return the names of the secrets that a value gives, whatever it holds.

    >>> secrets_in({"worker_init": "module load cuda; export HF_TOKEN=hf_abc", "secret": "pull", "nodes": 2})
    ['HF_TOKEN']
    """
    if isinstance(value, dict):
        texts = [str(name) for name, each in value.items() if each and isinstance(each, str)]
        named = [name for name in texts if is_secret(name) and name != "secret"]  # Which Parsl has for a name of one.
        return [*named, *(name for each in value.values() for name in secrets_in(each))]
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in secrets_in(each)]
    return _GIVEN.findall(value) if isinstance(value, str) else []
