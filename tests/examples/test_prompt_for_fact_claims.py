import json

import pytest
from claims import (
    LABELS,
    Claim,
    build_database,
    join,
    majority_label,
    of_split,
    parse_evidence,
    parse_row,
    read_claims,
    split_by_hash,
)
from hypothesis import given
from hypothesis import strategies as st


def row(**changes):
    return {"id": 1, "claim": "Paris is in France.", "label": "SUPPORTS", **changes}


def write(path, *rows):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("SUPPORTS", "SUPPORTED"),
        ("SUPPORTED", "SUPPORTED"),
        ("REFUTES", "REFUTED"),
        ("Refuted", "REFUTED"),
        ("NOT ENOUGH INFO", "NOT ENOUGH INFO"),
        ("not_enough_info", "NOT ENOUGH INFO"),
    ],
)
def test_labels_of_fever_and_of_the_paper_are_read(written, label):
    assert parse_row(json.dumps(row(label=written)).encode(), 1).label == label


def test_bad_rows_are_left_out_with_one_line_each_that_says_why(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        row(),
        "not json\n",
        '"text"\n',
        row(id=2, claim=None),
        row(id=3, label="MAYBE"),
        row(id=[4]),
        row(id=1, claim="Another."),
        row(id=5, split="holdout"),
        "\n",
        row(id=6),
    )
    path.write_bytes(path.read_bytes() + b'{"id": 7, "claim": "\xff"}\n')
    claims, complaints = read_claims(path)
    assert [claim.key for claim in claims] == ["1", "6"]
    lines = [int(complaint.split("line ")[1].split(":")[0]) for complaint in complaints]
    assert lines == [2, 3, 4, 5, 6, 7, 8, 11]
    for complaint, reason in zip(
        complaints, ["JSON", "str", "claim", "MAYBE", "id", "before", "holdout", "UTF-8"], strict=True
    ):
        assert reason in complaint


def test_a_row_without_id_is_known_by_its_line(tmp_path):
    claims, complaints = read_claims(write(tmp_path / "c.jsonl", {"claim": "x", "label": "REFUTES"}))
    assert (claims[0].key, complaints) == ("line 1", [])


def test_an_empty_claim_belongs_to_the_control_group():
    assert parse_row(json.dumps(row(claim="  ", split="test")).encode(), 1).split == "control"


@pytest.mark.parametrize(
    ("value", "texts", "references"),
    [
        (None, [], ()),
        ([], [], ()),
        ("One. Two.", ["One. Two."], ()),
        (["One.", "Two."], ["One.", "Two."], ()),
        ([["Paris", 0], ["France", 3]], [], (("Paris", 0), ("France", 3))),
        ([[[9, 8, "Paris", 0], [9, 7, "Paris", 0]]], [], (("Paris", 0),)),
        ([[[9, None, None, None]]], [], ()),
        ({"page": 1}, [], ()),
    ],
)
def test_evidence_in_all_its_shapes(value, texts, references):
    assert parse_evidence(value) == (texts, references)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4)))
def test_evidence_of_any_shape_does_not_raise(value):
    texts, references = parse_evidence(value)
    assert all(isinstance(text, str) for text in texts)
    assert len(set(references)) == len(references)


def test_evidence_is_joined_in_the_order_cited_and_what_lacks_is_counted(tmp_path):
    text = tmp_path / "e.jsonl"
    write(text, {"page": "A", "sentence": 0, "text": "First."}, {"page": "A", "sentence": 1, "text": "Second."})
    build_database(text, tmp_path / "e.sqlite")
    claims = [
        Claim("1", "c", LABELS[0], "test", (("A", 1), ("A", 0))),
        Claim("2", "c", LABELS[0], "test", (("B", 0),), "Own."),
        Claim("3", "c", LABELS[0], "test"),
    ]
    joined, lacking = join(claims, tmp_path / "e.sqlite")
    assert [claim.evidence for claim in joined] == ["Second. First.", "Own.", ""]
    assert lacking == 1
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["e.jsonl", "e.sqlite"]


def test_bad_evidence_names_its_line_and_leaves_no_database(tmp_path):
    text = write(tmp_path / "e.jsonl", {"page": "A", "sentence": 0, "text": "x"}, {"page": "A"})
    with pytest.raises(ValueError, match="line 2 is no sentence"):
        build_database(text, tmp_path / "e.sqlite")
    assert not (tmp_path / "e.sqlite").exists()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "e.sqlite"
    path.write_text("no database at all, but long enough to look at" * 100)
    with pytest.raises(ValueError, match="no database of evidence"):
        join([Claim("1", "c", LABELS[0], "test", (("A", 1),))], path)


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, unique=True))
def test_the_split_of_a_claim_depends_on_its_text_alone(texts):
    assert [split_by_hash(text) for text in texts] == [split_by_hash(text) for text in texts]


def test_splits_by_hash_are_half_a_sixth_and_a_third():
    splits = [split_by_hash(f"claim {i}") for i in range(6000)]
    for name, share in (("train", 1 / 2), ("dev", 1 / 6), ("test", 1 / 3)):
        assert abs(splits.count(name) / 6000 - share) < 0.03


def test_majority_and_limits():
    claims = [Claim(str(i), "c", LABELS[i % 3 and 1], "test") for i in range(9)]
    assert majority_label(claims) == "REFUTED"
    assert [claim.key for claim in of_split(claims, "test", 2)] == ["0", "1"]
    assert of_split(claims, "dev") == []
