import pytest

from ctxflow.batch.templates import compile_template
from ctxflow.rows.source import RowError


def test_columns_are_variables_and_any_name_is_in_row(tmp_path):
    render = compile_template("{{ a }} {{ row['the b'] }}{% for c in cs %} {{ c }}{% endfor %}\n")
    assert render({"a": "<1>", "the b": 2, "cs": [3, 4]}) == "<1> 2 3 4\n"
    (tmp_path / "t.j2").write_text("{{ a }}?\n")
    assert compile_template(f"@{tmp_path}/t.j2")({"a": "é"}) == "é?"
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "t.j2").write_bytes("{{ a }}é\r\n?\r\n".encode(encoding))
        assert compile_template(f"@{tmp_path}/t.j2")({"a": "1"}) == "1é\n?"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ missing }}", "needs what the row lacks: 'missing' is undefined"),
        ("{{ a.b.c }}", "needs what the row lacks"),
        ("{{ 1 / 0 }}", "fails on the row: ZeroDivisionError"),
        ("{{ a.__class__.__mro__ }}", "'str' is unsafe|unsafe|needs what the row lacks"),
        ("{{ row.pop('a') }}", "fails on the row: SecurityError"),
        ("{% for n in range(10**9) %}{% endfor %}", "fails on the row: OverflowError"),
        ("{{ a.title }}", "needs what the row lacks: 'str object' has no attribute 'title'"),
        ("{{ order.keys }}", "needs what the row lacks: 'dict object' has no attribute 'keys'"),
        ("{% if order.keys %}yes{% endif %}", "needs what the row lacks"),
        ("{{ order.keys | length }}", "needs what the row lacks"),
        ("{{ parts.count }}", "needs what the row lacks: 'list object' has no attribute 'count'"),
        ("so {{ nothing }}", "needs what the row lacks: a value that is to be written is null"),
        ("{{ order.none }}", "is null"),
        ("{{ none }}", "is null"),
    ],
)
def test_what_a_row_cannot_fill_is_its_own_error(template, sentence):
    with pytest.raises(RowError, match=sentence):
        compile_template(template)(ROW)


ROW = {"a": "x", "order": {"items": ["bolt", "nut"], "values": 3, "none": None}, "parts": [1, 2], "nothing": None}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ order.items | join(' ') }}, {{ order['values'] }}", "bolt nut, 3"),
        ("{{ row.order.values }} {{ row['order'].items[1] }}", "3 nut"),
        ("{% for item in order.items %}{{ loop.index }}{{ item }}{{ loop.last }} {% endfor %}", "1boltFalse 2nutTrue "),
        ("{% for name, value in order.items() %}{{ name }} {% endfor %}{{ a.upper().lower() }}", "items values none x"),
        ("{{ [order] | map(attribute='items') | first | last }}", "nut"),
        ("{% set ns = namespace(n=0) %}{% for n in parts %}{% set ns.n = ns.n + n %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ nothing or '' }}{{ nothing | default('none', true) }}{{ nothing is none }}{{ order.n is defined }}",
         "noneTrueFalse"),
        ("{% macro m(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call m(a) %}{{ parts.0 }}{% endcall %}", "<x>1"),
    ],
)  # fmt: skip
def test_fields_are_keys_and_methods_are_called(template, text):
    assert compile_template(template)(ROW) == text


def test_a_template_that_is_none_is_told_before_any_row():
    with pytest.raises(ValueError, match=r"no Jinja2 template: .*\(line 2\)"):
        compile_template("a\n{{ b")
    with pytest.raises(ValueError, match="cannot be read"):
        compile_template("@/no/such/file")
