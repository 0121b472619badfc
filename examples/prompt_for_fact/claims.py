"""Claims and their evidence: the FEVER-style JSONL reader, the evidence database, the splits.

What lives here: getting from files to `Claim` objects whose evidence is text. What does not: what is asked
about them (templates.py), or by which model (verifier.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LABELS = ("SUPPORTED", "REFUTED", "NOT ENOUGH INFO")
SPLITS = ("train", "dev", "test", "control")

_LABEL_NAMES = {
    "SUPPORTED": "SUPPORTED",
    "SUPPORTS": "SUPPORTED",
    "REFUTED": "REFUTED",
    "REFUTES": "REFUTED",
    "NOT ENOUGH INFO": "NOT ENOUGH INFO",
}

Reference = tuple[str, int]


@dataclass(frozen=True)
class Claim:
    """One claim with its label.

    :ivar key: the row's id as text, or `line N` where the row has none; unique in a file.
    :ivar text: the claim; empty for the control group.
    :ivar label: one of `LABELS`.
    :ivar split: "train", "dev", "test" or "control".
    :ivar references: sentences of the database that the row cites, as (page, sentence number).
    :ivar evidence: the evidence as text: what the row itself held, or what `join` found; "" for none.
    """

    key: str
    text: str
    label: str
    split: str
    references: tuple[Reference, ...] = ()
    evidence: str = ""


class BadRow(ValueError):
    """A row that is no claim, with the reason."""


def read_claims(path: Path) -> tuple[list[Claim], list[str]]:
    """Read FEVER-style JSONL: ``{"id", "claim", "label"[, "evidence"][, "split"]}`` a line.

    :returns: the claims in the file's order, and one message for each row that is none (the row is left out).
    :raises OSError: if the file cannot be read.
    """
    claims: dict[str, Claim] = {}
    complaints: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                claim = parse_row(line, number)
                if claim.key in claims:
                    raise BadRow(f"the id {claim.key} was used before")
                claims[claim.key] = claim
            except BadRow as error:
                complaints.append(f"{path.name}, line {number}: {error}; the row is left out")
    return list(claims.values()), complaints


def parse_row(line: bytes, number: int) -> Claim:
    """Read one row.

    :raises BadRow: if it is no claim, saying why.

    >>> parse_row(b'{"id": 7, "claim": "Paris is in France.", "label": "SUPPORTS"}', 1).label
    'SUPPORTED'
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("it is not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRow(f"it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadRow(f"it is a JSON {type(row).__name__}, not an object with id, claim and label")
    text, label = row.get("claim"), row.get("label")
    if not isinstance(text, str):
        raise BadRow('it has no "claim" text')
    name = _LABEL_NAMES.get(" ".join(str(label).replace("_", " ").upper().split()))
    if name is None:
        raise BadRow(f'its "label" is {label!r}, not one of {", ".join(LABELS)}')
    key = row.get("id")
    if key is not None and (isinstance(key, bool) or not isinstance(key, (int, str))):
        raise BadRow(f'its "id" is {key!r}, not a number or text')
    key = f"line {number}" if key is None else str(key)
    split = row.get("split")
    if split is None:
        split = split_by_hash(text)
    elif split not in SPLITS:
        raise BadRow(f'its "split" is {split!r}, not one of {", ".join(SPLITS)}')
    texts, references = parse_evidence(row.get("evidence"))
    text = " ".join(text.split())
    return Claim(key, text, name, split if text else "control", references, " ".join(texts))


def parse_evidence(value: Any) -> tuple[list[str], tuple[Reference, ...]]:
    """Take a row's evidence apart: sentences that it holds, and references to the database.

    A reference is ``[page, sentence]``, or FEVER's ``[annotation, evidence, page, sentence]``; lists of
    either may be nested, as FEVER's are. Text stands for itself.

    >>> parse_evidence([[[12, 34, "Paris", 0], [12, 35, "Paris", 4]]])
    ([], (('Paris', 0), ('Paris', 4)))
    >>> parse_evidence("Paris is the capital of France.")
    (['Paris is the capital of France.'], ())
    """
    texts: list[str] = []
    references: dict[Reference, None] = {}

    def walk(part: Any) -> None:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, list):
            page, sentence = part[-2:] if len(part) in (2, 4) else (None, None)
            if isinstance(page, str) and isinstance(sentence, int):
                references[page, sentence] = None
            elif not (len(part) == 4 and page is None and sentence is None):
                for inner in part:
                    walk(inner)

    walk(value)
    return texts, tuple(references)


def split_by_hash(text: str) -> str:
    """Choose the split of a claim whose row names none: half train, a sixth dev, a third test."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 6
    return "train" if place < 3 else "dev" if place == 3 else "test"


def build_database(evidence: Path, database: Path) -> None:
    """Build the SQLite database of evidence from its text form, one ``{"page", "sentence", "text"}`` a line.

    It is written beside its place and moved there, so that a database is whole or not there.

    :raises ValueError: for a line that holds no sentence, naming it.
    """

    def rows() -> Iterator[tuple[str, int, str, str]]:
        with evidence.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    yield str(row["page"]), int(row["sentence"]), str(row["text"]), str(row.get("source", ""))
                except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                    raise ValueError(
                        f"{evidence.name}, line {number} is no sentence of evidence ({error}): "
                        'write {"page": ..., "sentence": ..., "text": ...}'
                    ) from None

    partial = database.with_suffix(f".{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial)
    try:
        with connection:
            connection.execute(
                "CREATE TABLE sentences (page TEXT, sentence INTEGER, text TEXT NOT NULL, source TEXT,"
                " PRIMARY KEY (page, sentence)) WITHOUT ROWID"
            )
            connection.executemany("INSERT OR REPLACE INTO sentences VALUES (?, ?, ?, ?)", rows())
        connection.close()
        partial.replace(database)
    finally:
        connection.close()
        partial.unlink(missing_ok=True)


def join(claims: Iterable[Claim], database: Path) -> tuple[list[Claim], int]:
    """Look up the sentences that claims cite and put their text, in the order cited, into `evidence`.

    :returns: the claims, and how many of them cite a sentence that the database lacks.
    :raises ValueError: if the file is no database of evidence.
    """
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    joined: list[Claim] = []
    lacking = 0
    try:
        for claim in claims:
            found = [_sentence(connection, reference) for reference in claim.references]
            lacking += None in found
            texts = [text for text in (claim.evidence, *found) if text]
            joined.append(replace(claim, evidence=" ".join(texts)))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{database} is no database of evidence ({error}): give JSONL or build it anew") from None
    finally:
        connection.close()
    return joined, lacking


def _sentence(connection: sqlite3.Connection, reference: Reference) -> str | None:
    query = "SELECT text FROM sentences WHERE page = ? AND sentence = ?"
    row = connection.execute(query, reference).fetchone()
    return None if row is None else str(row[0])


def of_split(claims: Iterable[Claim], split: str, limit: int | None = None) -> list[Claim]:
    """The claims of one split, at most `limit` of them, in their order."""
    return [claim for claim in claims if claim.split == split][:limit]


def majority_label(claims: Sequence[Claim]) -> str:
    """The label that most claims have; of equals, the first in `LABELS`."""
    counts = Counter(claim.label for claim in claims)
    return max(LABELS, key=lambda label: counts[label])
