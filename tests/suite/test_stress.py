"""A hunt and a stress lane say what failed."""

from suite import hunt, stress

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_b"><failure message="assert 1 == 2">  where

it was</failure></testcase>
<testcase classname="tests.test_a" name="test_c"/>
<testcase classname="tests.test_a" name="test_d"><error message="fixture">why</error></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_of_a_report(tmp_path):
    assert hunt.failures(tmp_path / "none.xml") == {}
    (tmp_path / "run.xml").write_text(REPORT)
    found = hunt.failures(tmp_path / "run.xml")
    assert found == {
        "tests.test_a::test_b": "assert 1 == 2\n  where\nit was",
        "tests.test_a::test_d": "fixture\nwhy",
    }


def test_what_keeps_the_machine_busy_ends():
    with stress.beside(1, 0.01):
        pass
