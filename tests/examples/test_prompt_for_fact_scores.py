import math

import pytest
from claims import LABELS, Claim
from hypothesis import given
from hypothesis import strategies as st
from scores import Score, baseline_score, beats, evaluation, ranked, score_pair, wilson

counts = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts)
def test_the_interval_holds_the_share_and_stays_within_0_and_1(pair):
    correct, n = pair
    low, high = wilson(correct, n)
    assert 0 <= low <= correct / n <= high <= 1
    assert low < high


@given(counts)
def test_the_interval_ends_where_the_share_is_z_standard_errors_away(pair):
    correct, n = pair
    for end in wilson(correct, n):
        if 1e-9 < end < 1 - 1e-9:
            z = abs(correct / n - end) / math.sqrt(end * (1 - end) / n)
            assert math.isclose(z, 1.959963984540054, rel_tol=1e-6)


@given(counts)
def test_wrong_and_right_are_mirror_images(pair):
    correct, n = pair
    low, high = wilson(correct, n)
    other_low, other_high = wilson(n - correct, n)
    assert math.isclose(low, 1 - other_high, abs_tol=1e-12)
    assert math.isclose(high, 1 - other_low, abs_tol=1e-12)


def test_the_interval_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for correct, n in ((0, 10), (7, 10), (650, 933), (933, 933)):
        expected = stats.binomtest(correct, n).proportion_ci(method="wilson")
        assert wilson(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_is_no_proportion_of_less_and_says_so():
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 of 2 is no proportion"):
        wilson(3, 2)


def claims():
    splits = ["dev"] * 3 + ["test"] * 3 + ["control"]
    return [Claim(str(i), "c", LABELS[i % 3], split) for i, split in enumerate(splits)]


def answered(model, template, wrong=()):
    asked = claims()
    answers = {claim.key: None if claim.key in wrong else claim.label for claim in asked}
    return score_pair(model, "", template, asked, answers)


def test_a_claim_without_an_answer_counts_as_wrong():
    result = answered("m", "t", wrong=("0", "4", "5"))
    assert (result.dev, result.test, result.unanswered) == (Score(2, 3), Score(1, 3), 3)


def test_the_control_group_is_right_only_as_not_enough_info():
    asked = [Claim("1", "", "NOT ENOUGH INFO", "control"), Claim("2", "", "NOT ENOUGH INFO", "control")]
    result = score_pair("m", "", "t", asked, {"1": "NOT ENOUGH INFO", "2": "SUPPORTED"})
    assert (result.control, result.test.accuracy) == (Score(1, 2), None)


def test_the_best_pair_is_chosen_by_dev_and_not_by_test():
    good_on_dev = answered("a", "t", wrong=("4", "5"))
    good_on_test = answered("b", "t", wrong=("0",))
    assert [result.model for result in ranked([good_on_test, good_on_dev])] == ["a", "b"]


def test_equal_pairs_have_one_order():
    results = [answered("b", "t"), answered("a", "u"), answered("a", "t")]
    order = [(result.model, result.template) for result in ranked(results)]
    assert (
        order
        == [("a", "t"), ("a", "u"), ("b", "t")]
        == [(result.model, result.template) for result in ranked(results[::-1])]
    )


def test_beating_needs_intervals_apart():
    assert beats(Score(600, 900), Score(300, 900))
    assert not beats(Score(320, 900), Score(300, 900))


def test_the_evaluation_holds_errors_with_n_and_interval():
    results = [answered("a", "t", wrong=("3",)), answered("b", "t")]
    written = evaluation(results, baseline_score(claims(), "SUPPORTED"), "SUPPORTED", "digest")
    assert written["best"] == {"model": "a", "template": "t"}
    row = written["evaluations"][0]
    low, high = wilson(2, 3)
    assert (row["error"], row["n"]) == (0.333333, 3)
    assert row["interval"] == pytest.approx([1 - high, 1 - low], abs=1e-6)
    assert written["baseline"]["error"] == 0.666667
