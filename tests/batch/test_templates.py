import pytest

from ctxflow.batch.templates import compile_template
from ctxflow.rows.source import RowError


def test_columns_are_variables_and_any_name_is_in_row(tmp_path):
    render = compile_template("{{ a }} {{ row['the b'] }}{% for c in cs %} {{ c }}{% endfor %}\n")
    assert render({"a": "<1>", "the b": 2, "cs": [3, 4]}) == "<1> 2 3 4\n"
    (tmp_path / "t.j2").write_text("{{ a }}?\n")
    assert compile_template(f"@{tmp_path}/t.j2")({"a": "é"}) == "é?"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ missing }}", "needs what the row lacks: 'missing' is undefined"),
        ("{{ a.b.c }}", "needs what the row lacks"),
        ("{{ 1 / 0 }}", "fails on the row: ZeroDivisionError"),
        ("{{ a.__class__.__mro__ }}", "'str' is unsafe|unsafe|needs what the row lacks"),
        ("{{ row.pop('a') }}", "fails on the row: SecurityError"),
        ("{% for n in range(10**9) %}{% endfor %}", "fails on the row: OverflowError"),
    ],
)
def test_what_a_row_cannot_fill_is_its_own_error(template, sentence):
    with pytest.raises(RowError, match=sentence):
        compile_template(template)({"a": "x"})


def test_a_template_that_is_none_is_told_before_any_row():
    with pytest.raises(ValueError, match=r"no Jinja2 template: .*\(line 2\)"):
        compile_template("a\n{{ b")
    with pytest.raises(ValueError, match="cannot be read"):
        compile_template("@/no/such/file")
