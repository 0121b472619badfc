"""The sweep: every pair of model and template asked about every claim, through ctxflow's public API.

What lives here: the order of the work and the files that let it go on after a stop. What does not: the
command line and the site (prompt_for_fact.py), workers (verifier.py), figures and tables (scores.py and
report.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from claims import Claim
from heads import fit_head, load_head, save_head, texts_to_embed
from scores import PairResult, score_pair
from templates import Template
from verifier import Head, Vectors, embed, first_layers, unpack, verify_by_encoder, verify_by_likelihood

from ctxflow import Context
from ctxflow.models import classifier, encoder
from models import Model


class Listener(Protocol):
    """Somebody who watches the sweep go on."""

    def stage(self, name: str) -> None:
        """This comes now."""

    def advance(self, items: int = 1) -> None:
        """So many more items are done."""


def digest(*parts: Any) -> str:
    """A short digest of plain data, for the names of files that must not be mixed up."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=asdict)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


@dataclass
class Sweep:
    """One sweep over models and templates.

    :ivar out: the folder of results; what is there from an earlier start is used.
    :ivar train: claims that encoders' heads are fitted on.
    :ivar asked: claims that every pair is asked about.
    :ivar repeat: how many times over they are asked, to make the sweep bigger; the first time counts.
    :ivar gpus: GPUs that a model's context occupies.
    :ivar dead: items that got no answer; `first_failure` says why the first did not.
    """

    out: Path
    models: Sequence[Model]
    templates: Sequence[Template]
    train: Sequence[Claim]
    asked: Sequence[Claim]
    repeat: int = 1
    gpus: int = 0
    dead: int = 0
    first_failure: str = ""

    @cached_property
    def _train_digest(self) -> str:
        return digest(self.train)

    @cached_property
    def _asked_digest(self) -> str:
        return digest(self.asked)

    def missing_heads(self, model: Model) -> list[Template]:
        """The templates that an encoder has no head for yet."""
        if model.kind != "encoder":
            return []
        return [t for t in self.templates if load_head(self._head_file(model, t)) is None]

    def total_items(self) -> int:
        """How many items the sweep has in all, those that an earlier start answered among them."""
        texts = sum(len(texts_to_embed(self.train, self.missing_heads(model))) for model in self.models)
        return texts + len(self.models) * len(self.templates) * len(self.asked) * self.repeat

    def run(self, listener: Listener) -> list[PairResult]:
        """Ask every pair and score it; an executor must be running."""
        results = []
        for model in self.models:
            heads = self._heads(model, listener)
            for template in self.templates:
                listener.stage(f"{model.name} / {template.name}")
                answers = self._ask(model, template, heads.get(template.name), listener)
                results.append(score_pair(model.name, model.note, template.name, self.asked, answers))
        return results

    def context(self, model: Model) -> Context:
        """The recipe of a model; a folder on this machine is staged to the workers."""
        staged = {"files": {"model": model.source}} if Path(model.source).is_dir() else {}
        source = {} if staged else {"model": model.source}
        if model.kind == "lm":
            return classifier.options(gpus=self.gpus, **staged)(**source)
        if model.layers is None:
            return encoder.options(gpus=self.gpus, **staged)(**source)
        return first_layers.options(gpus=self.gpus, **staged)(**source, layers=model.layers)

    def _heads(self, model: Model, listener: Listener) -> dict[str, Head]:
        """The head of each template, fitted on the training split where no earlier start has done it."""
        missing = self.missing_heads(model)
        if missing:
            listener.stage(f"{model.name} / fitting")
            file = self._file("vectors", model, None, missing, self._train_digest)
            vectors = self._embed(model, texts_to_embed(self.train, missing), file, listener)
            for template in missing:
                head_file = self._head_file(model, template)
                head_file.parent.mkdir(parents=True, exist_ok=True)
                save_head(fit_head(self.train, template, vectors), head_file)
            file.unlink(missing_ok=True)
        heads = {template.name: load_head(self._head_file(model, template)) for template in self.templates}
        return {name: head for name, head in heads.items() if head is not None}

    def _embed(self, model: Model, texts: list[str], file: Path, listener: Listener) -> dict[str, Vectors]:
        """The vector of each text.

        :raises RuntimeError: if a text could not be embedded, with the reason.
        """
        vectors: dict[str, Vectors] = {}
        stream = embed.using(self.context(model)).map(texts, resume=str(file), on_error="return")
        with closing(stream) as answers:
            for text, answer in zip(texts, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise RuntimeError(f"{model.name} cannot be fitted: {answer}") from answer
                vectors[text] = unpack(answer)
                listener.advance()
        return vectors

    def _ask(self, model: Model, template: Template, head: Head | None, listener: Listener) -> dict[str, str | None]:
        """The answer of a pair to each claim by its key, None for an item that is dead."""
        app, constants = (
            (verify_by_likelihood, {"template": template})
            if head is None
            else (verify_by_encoder, {"template": template, "head": head})
        )
        claims = [claim for _ in range(self.repeat) for claim in self.asked]
        file = self._file("answers", model, template, self._train_digest, self._asked_digest, self.repeat)
        stream = app.using(self.context(model)).map(
            (claim.text for claim in claims),
            (claim.evidence for claim in claims),
            resume=str(file),
            on_error="return",
            **constants,
        )
        labels: dict[str, str | None] = {}
        with closing(stream) as answers:
            for claim, answer in zip(claims, answers, strict=True):
                dead = isinstance(answer, BaseException)
                if dead:
                    self.dead += 1
                    self.first_failure = self.first_failure or f"{model.name} / {template.name}: {answer}"
                labels.setdefault(claim.key, None if dead else answer)
                listener.advance()
        self._write_answers(model, template, labels)
        return labels

    def _write_answers(self, model: Model, template: Template, answers: dict[str, str | None]) -> None:
        """Write one pair's answers as plain JSONL for whoever reads on."""
        file = self.out / "results" / f"{_plain(model.name)}.{template.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        note = {"note": model.note} if model.note else {}
        with file.open("w", encoding="utf-8") as lines:
            for claim in self.asked:
                row = {
                    "id": claim.key,
                    "model": model.name,
                    **note,
                    "template": template.name,
                    "split": claim.split,
                    "label": claim.label,
                    "answer": answers[claim.key],
                }
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _head_file(self, model: Model, template: Template) -> Path:
        return self._file("heads", model, template, self._train_digest).with_suffix(".npz")

    def _file(self, kind: str, model: Model, template: Template | None, *inputs: Any) -> Path:
        """A file whose name holds the digest of all that its content depends on."""
        name = f"{_plain(model.name)}.{template.name if template else 'all'}"
        return self.out / "state" / kind / f"{name}.{digest(model, template, *inputs)}.jsonl"


def _plain(name: str) -> str:
    """A model's name as part of a file's name."""
    return re.sub(r"[^\w@.-]+", "_", name)
