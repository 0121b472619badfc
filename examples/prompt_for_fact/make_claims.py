"""Write ``claims.jsonl`` and ``evidence.jsonl`` from the tables in ``facts/``: the same bytes every time.

Run it after editing a table or a phrasing: ``python examples/prompt_for_fact/make_claims.py``. The tables
hold the facts, ``facts/phrasings.json`` the wording and the kind of source of each table; this file holds the
choosing.

A *fact* is one cell of a table: a subject (the row), a relation (the column) and a value. Each chosen fact
gives three claims, one per label, and the label is a matter of the evidence alone:

* SUPPORTED and REFUTED claims come with the sentence that states the fact. The wrong values are the true
  values of other facts of the same relation, dealt out anew (so every value is claimed as often truly as
  falsely), and a fifth of the claims of every label are denials, whose true and wrong values swap sides.
* NOT ENOUGH INFO claims, true or wrong in equal parts, come with a sentence on another matter: another fact
  about the same subject, or the same kind of fact about another subject.
* A third of the claims of every label carry one more sentence on the same subject that settles nothing.

All claims on one subject, and every sentence they cite, are in one split.
"""

from __future__ import annotations

import csv
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 2025
SECOND_FACT = 0.15  # share of the subjects that give two facts to claim instead of one
DENIALS = 0.2  # share of the claims, of every label, that deny
TRUE_WHEN_OPEN = 0.5  # share of the NOT ENOUGH INFO claims that name the true value
OTHER_SUBJECT = 0.3  # share of the NOT ENOUGH INFO claims whose evidence is about another subject
EXTRA_SENTENCE = 1 / 3  # share of the claims that cite a second sentence
SPLITS = (("train", 0.50), ("dev", 0.17), ("test", 0.33))
CONTROLS = 60


@dataclass(frozen=True)
class Fact:
    """One cell of a table; ``accepted`` holds every value that is also true, ``value`` first among them."""

    page: str
    subject: str
    column: str
    value: str
    accepted: tuple[str, ...]
    phrasing: dict[str, Any]
    source: str
    sentence: int

    @property
    def reference(self) -> list[str | int]:
        """Where the database keeps the sentence that states this fact."""
        return [self.page, self.sentence]


def read_facts(folder: Path) -> list[Fact]:
    """Read every table that ``phrasings.json`` names, in its order."""
    facts: list[Fact] = []
    for table in json.loads((folder / "phrasings.json").read_text("utf-8")):
        kind = Path(table["file"]).stem
        with (folder / table["file"]).open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                name = next(iter(row.values()))
                subject = re.sub(r" \(.*\)$", "", name)
                stated = 0
                for phrasing in table["relations"]:
                    values = tuple(filter(None, row[phrasing["column"]].split(";")))
                    if values:
                        facts.append(
                            Fact(
                                f"{kind}: {name}",
                                subject,
                                f"{kind}.{phrasing['column']}",
                                values[0],
                                values,
                                phrasing,
                                table["source"],
                                stated,
                            )
                        )
                        stated += 1
    return facts


def sentence(pattern: str, subject: str, value: str) -> str:
    """Fill a phrasing in and begin it with a capital letter."""
    text = pattern.format(s=subject, v=value)
    return text[0].upper() + text[1:]


def split_of(pages: list[str], rng: random.Random) -> dict[str, str]:
    """Deal the pages (subjects) out to the splits, kind by kind, so that each split holds every kind."""
    splits: dict[str, str] = {}
    for kind in sorted({page.split(":")[0] for page in pages}):
        members = sorted({page for page in pages if page.startswith(f"{kind}:")})
        rng.shuffle(members)
        start = 0.0
        for name, share in SPLITS:
            low, high = round(start * len(members)), round((start + share) * len(members))
            splits.update(dict.fromkeys(members[low:high], name))
            start += share
    return splits


def wrong_values(facts: list[Fact], rng: random.Random) -> list[tuple[Fact, str]]:
    """Deal the facts' own values out among them so that nobody gets a value that is true for it.

    Facts that cannot be served (a value that half of a relation shares) are left out.
    """
    facts = list(facts)
    while facts:
        values = [fact.value for fact in facts]
        rng.shuffle(values)
        for i, fact in enumerate(facts):
            if values[i] not in fact.accepted:
                continue
            for j, other in enumerate(facts):
                if values[j] not in fact.accepted and values[i] not in other.accepted:
                    values[i], values[j] = values[j], values[i]
                    break
        bad = [i for i, fact in enumerate(facts) if values[i] in fact.accepted]
        if not bad:
            return list(zip(facts, values, strict=True))
        del facts[bad[0]]
    return []


def open_evidence(fact: Fact, claimed: str, nearby: list[Fact], rng: random.Random) -> Fact:
    """Choose a sentence that is related to the claim and settles nothing about it."""
    telling = {fact.phrasing["column"], *fact.phrasing.get("implied_by", [])}
    same = [f for f in nearby if f.page == fact.page and f.phrasing["column"] not in telling]
    other = [f for f in nearby if f.page != fact.page and f.column == fact.column and claimed not in f.accepted]
    if not same or (other and rng.random() < OTHER_SUBJECT):
        return rng.choice(other)
    return rng.choice(same)


def claim_rows(fact: Fact, wrong: str, nearby: list[Fact], rng: random.Random) -> list[dict[str, Any]]:
    """Write the three claims, one per label, that a fact gives."""
    rows = []
    for label in ("SUPPORTED", "REFUTED", "NOT ENOUGH INFO"):
        denied = rng.random() < DENIALS
        true_value = rng.random() < TRUE_WHEN_OPEN if label == "NOT ENOUGH INFO" else (label == "SUPPORTED") != denied
        value = fact.value if true_value else wrong
        evidence = fact if label != "NOT ENOUGH INFO" else open_evidence(fact, value, nearby, rng)
        cited = [evidence]
        told = {evidence.phrasing["column"], fact.phrasing["column"], *fact.phrasing.get("implied_by", [])}
        more = [f for f in nearby if f.page == evidence.page and f.phrasing["column"] not in told]
        if more and rng.random() < EXTRA_SENTENCE:
            cited.append(rng.choice(more))
            rng.shuffle(cited)
        pattern = rng.choice(fact.phrasing["denials" if denied else "claims"])
        rows.append(
            {
                "claim": sentence(pattern, fact.subject, value),
                "label": label,
                "evidence": [f.reference for f in cited],
            }
        )
    return rows


def make(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of ``claims.jsonl`` and of ``evidence.jsonl``."""
    rng = random.Random(SEED)
    facts = read_facts(folder)
    splits = split_of([fact.page for fact in facts], rng)
    chosen: list[Fact] = []
    for page in dict.fromkeys(fact.page for fact in facts):
        own = [fact for fact in facts if fact.page == page]
        chosen += rng.sample(own, min(len(own), 2 if rng.random() < SECOND_FACT else 1))
    claims: list[dict[str, Any]] = []
    for split, _ in SPLITS:
        for column in dict.fromkeys(fact.column for fact in facts):
            group = [fact for fact in chosen if fact.column == column and splits[fact.page] == split]
            kind = column.split(".")[0]
            nearby = [f for f in facts if splits[f.page] == split and f.column.startswith(f"{kind}.")]
            for fact, wrong in wrong_values(group, rng):
                claims += [{**row, "split": split} for row in claim_rows(fact, wrong, nearby, rng)]
    rng.shuffle(claims)
    for fact in rng.sample(facts, CONTROLS):
        claims.append({"claim": "", "label": "NOT ENOUGH INFO", "evidence": [fact.reference], "split": "control"})
    evidence = [
        {
            "page": fact.page,
            "sentence": fact.sentence,
            "text": sentence(rng.choice(fact.phrasing["evidence"]), fact.subject, fact.value),
            "source": fact.source,
        }
        for fact in facts
    ]
    return [{"id": number, **row} for number, row in enumerate(claims, 1)], evidence


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Write both files beside this one and say what is in them."""
    claims, evidence = make(HERE / "facts")
    write_jsonl(HERE / "claims.jsonl", claims)
    write_jsonl(HERE / "evidence.jsonl", evidence)
    counts = {name: sum(row["split"] == name for row in claims) for name in ("train", "dev", "test", "control")}
    print(f"{len(claims)} claims {counts}, {len(evidence)} sentences of evidence")


if __name__ == "__main__":
    main()
