import numpy as np
import pytest
from claims import LABELS, Claim
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from templates import Template
from verifier import Head, features, pack, unpack

pytest.importorskip("sklearn")

from heads import fit_head, load_head, save_head, texts_to_embed

ONE, TWO = Template("one", ("{claim}",)), Template("two", ("{claim}", "{evidence}"))


def problem(labels=LABELS, n=60, seed=0):
    """Claims whose vectors tell their label plainly."""
    rng = np.random.default_rng(seed)
    claims, vectors = [], {}
    for i in range(n):
        label = labels[i % len(labels)]
        claims.append(Claim(str(i), f"claim {i}", label, "train", evidence=f"evidence {i}"))
        u = rng.normal(size=12)
        u[LABELS.index(label)] += 6
        vectors[f"claim {i}"] = u.astype(np.float32)
        vectors[f"evidence {i}"] = rng.normal(size=12).astype(np.float32)
    return claims, vectors


@given(arrays(np.float32, st.integers(1, 400), elements=st.floats(width=32, allow_nan=False)))
def test_a_vector_packed_and_unpacked_is_the_same(vector):
    assert np.array_equal(unpack(pack(vector)), vector)


@given(st.integers(1, 5), st.integers(1, 8))
def test_features_of_two_texts_do_not_depend_on_their_order(items, dimension):
    rng = np.random.default_rng(items * 10 + dimension)
    u, v = rng.normal(size=(2, items, dimension)).astype(np.float32)
    assert features([u]) is u
    assert features([u, v]).shape == (items, 2 * dimension)
    assert np.array_equal(features([u, v]), features([v, u]))


def test_each_text_is_embedded_once():
    claims, _ = problem(n=5)
    assert texts_to_embed([*claims, *claims], [ONE, TWO]) == [
        *(f"claim {i}" for i in range(5)),
        *(f"evidence {i}" for i in range(5)),
    ]
    assert texts_to_embed(claims, []) == []


def test_a_head_learns_what_can_be_learned():
    claims, vectors = problem()
    head = fit_head(claims, ONE, vectors)
    answers = head.labels(np.stack([vectors[claim.text] for claim in claims]))
    assert answers == [claim.label for claim in claims]


@pytest.mark.parametrize("labels", [LABELS[:2], LABELS[1:], (LABELS[2], LABELS[0])])
def test_a_head_of_two_labels_never_gives_the_third(labels):
    claims, vectors = problem(labels)
    head = fit_head(claims, ONE, vectors)
    answers = head.labels(np.stack([vectors[claim.text] for claim in claims]))
    assert answers == [claim.label for claim in claims]


def test_a_feature_that_never_changes_does_no_harm():
    claims, vectors = problem()
    for vector in vectors.values():
        vector[5] = 0.25
    head = fit_head(claims, ONE, vectors)
    assert np.isfinite(head.weights).all()


def test_vectors_that_differ_by_rounding_give_a_head_that_answers_alike():
    claims, vectors = problem(n=90)
    rng = np.random.default_rng(1)
    near = {text: v + rng.normal(scale=1e-7, size=v.shape).astype(np.float32) for text, v in vectors.items()}
    a, b = fit_head(claims, TWO, vectors), fit_head(claims, TWO, near)
    assert np.allclose(a.weights, b.weights, atol=1e-4)


def test_one_label_alone_teaches_nothing():
    claims, vectors = problem(LABELS[:1])
    with pytest.raises(ValueError, match="fewer than two labels"):
        fit_head(claims, ONE, vectors)
    with pytest.raises(ValueError, match="0 claims"):
        fit_head([], ONE, vectors)


def test_a_head_is_kept_whole_or_not_at_all(tmp_path):
    head = Head(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, -np.inf, 1], dtype=np.float32))
    path = tmp_path / "h.npz"
    assert load_head(path) is None
    save_head(head, path)
    kept = load_head(path)
    assert np.array_equal(kept.weights, head.weights)
    assert np.array_equal(kept.offsets, head.offsets)
    path.write_bytes(path.read_bytes()[:40])
    assert load_head(path) is None
    path.write_bytes(b"")
    assert load_head(path) is None
