"""Prompt templates: how a claim and its evidence are put into the text, or texts, that a model reads.

One template serves both kinds of models. A sentence encoder turns each text of a template into a vector; a
language model reads the texts line by line, then the question that `prompt` adds. No model is called here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

QUESTION = "Is the claim true? Answer yes, no or unknown.\nAnswer:"
WORDS = {"yes": "SUPPORTED", "no": "REFUTED", "unknown": "NOT ENOUGH INFO"}
"""What a language model answers with: single words, so that no label is likelier for being short."""


class Template(NamedTuple):
    """A name, and one or two texts with ``{claim}`` and ``{evidence}`` in them.

    >>> Template("tagged", ("evidence: {evidence} claim: {claim}",)).texts("Water is wet.", "Water wets.")
    ['evidence: Water wets. claim: Water is wet.']
    """

    name: str
    parts: tuple[str, ...]

    def checked(self) -> Template:
        """The template itself.

        :raises ValueError: if it is none, saying what to change.
        """
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                f"the template name {self.name!r} has odd characters: use letters, digits, '.', '_' and '-'"
            )
        if len(self.parts) not in (1, 2):
            raise ValueError(f"the template {self.name} has {len(self.parts)} texts: give one or two")
        for part in self.parts:
            if not re.search(r"\{claim\}|\{evidence\}", part):
                raise ValueError(f"the template {self.name} has a text without {{claim}} or {{evidence}}: {part!r}")
        return self

    @property
    def needs_evidence(self) -> bool:
        """Whether the template shows the evidence."""
        return any("{evidence}" in part for part in self.parts)

    def texts(self, claim: str, evidence: str) -> list[str]:
        """Fill the texts in. Whatever the claim and evidence hold, braces too, is taken as it is."""
        values = {"claim": claim, "evidence": evidence}
        return [re.sub(r"\{(claim|evidence)\}", lambda m: values[m[1]], part) for part in self.parts]

    def prompt(self, claim: str, evidence: str) -> str:
        """Write the prompt for a language model: the texts, and the question."""
        return "\n".join([*self.texts(claim, evidence), QUESTION])


KNOWN = (
    Template("claim-only", ("{claim}",)),
    Template("claim-question", ("Is it true that {claim}",)),
    Template("joined", ("{evidence} {claim}",)),
    Template("tagged", ("evidence: {evidence} claim: {claim}",)),
    Template("question", ("Given that: {evidence} Is it true that {claim}",)),
    Template("separate", ("{claim}", "{evidence}")),
    Template("separate-tagged", ("claim: {claim}", "evidence: {evidence}")),
)
DEFAULT = ("claim-only", "tagged", "separate")


def suited(has_evidence: bool) -> list[Template]:
    """The templates to sweep where none are named: a few of each sort, or those that need no evidence.

    >>> [template.name for template in suited(has_evidence=False)]
    ['claim-only', 'claim-question']
    """
    if has_evidence:
        return [template for template in KNOWN if template.name in DEFAULT]
    return [template for template in KNOWN if not template.needs_evidence]


def choose(names: Sequence[str]) -> list[Template]:
    """Find templates by name, or read them from files: JSON objects ``{name: text or [text, text]}``.

    :raises ValueError: for a name or a file that is no template, saying what there is.
    """
    known = {template.name: template for template in KNOWN}
    chosen: dict[str, Template] = {}
    for name in names:
        if name in known:
            chosen[name] = known[name]
        elif name.endswith(".json"):
            chosen.update({template.name: template for template in read_templates(Path(name))})
        else:
            raise ValueError(f"there is no template {name!r}: choose from {', '.join(known)}, or give a .json file")
    return list(chosen.values())


def read_templates(path: Path) -> list[Template]:
    """Read templates from a file.

    :raises ValueError: if it holds anything else.
    """
    try:
        written = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the templates in {path} cannot be read: {error}") from None
    if not isinstance(written, dict) or not written:
        raise ValueError(f"{path} holds no templates: write a JSON object {{name: text or [text, text]}}")
    templates = []
    for name, texts in written.items():
        parts = [texts] if isinstance(texts, str) else texts
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"the template {name!r} in {path} is no text, nor a list of texts")
        templates.append(Template(name, tuple(parts)).checked())
    return templates
