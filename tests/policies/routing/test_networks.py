"""The trained networks: whatever they are shown, shares are on the simplex and forecasts are numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.errors import CtxflowError
from ctxflow.policies.torta.macro import FEATURES, Layers, SlotState, allocate, allocated, form, read
from ctxflow.policies.torta.quantities import accuracy, amounts, forecast
from ctxflow_papers.torta.forecasting import AHEAD, SLOTS, predict, write

SETTINGS = settings(max_examples=25, deadline=None)
NUMBERS = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, float("nan"), float("inf"), -1.0]))


@pytest.mark.parametrize("regions", [1, 2, 7])
@SETTINGS
@given(st.data())
def test_the_trained_form_s_rows_are_on_the_simplex(regions, data):
    def some(*shape):
        return np.array(
            data.draw(st.lists(NUMBERS, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        ).reshape(shape)

    capacity = some(regions)
    previous = some(regions, regions) if data.draw(st.booleans()) else None
    shares = form("trained")(some(3, regions), capacity, some(regions, regions), previous)
    assert shares.shape == (regions, regions) and np.isfinite(shares).all() and (shares >= 0).all()
    assert shares.sum(axis=1) == pytest.approx(1.0)
    alive = amounts(capacity) > 0
    if alive.any():
        assert (shares[:, ~alive] == 0).all()


def test_networks_that_are_no_numbers_give_transport():
    transport = np.array([[0.25, 0.75], [1.0, 0.0]])
    two = np.ones(2)
    seen = SlotState(two, two[None], two, two, two, two, two, transport, np.eye(2))
    assert allocated(np.full((2, 2), np.nan), seen) == pytest.approx(transport, abs=1e-3)
    networks = read()
    broken = dataclasses.replace(networks.head, biases=(*networks.head.biases[:-1], np.full(2, np.nan)))
    assert allocate(dataclasses.replace(networks, head=broken), seen) == pytest.approx(transport, abs=1e-3)


@SETTINGS
@given(st.integers(0, 12), st.integers(1, 5), st.data())
def test_predictions_are_numbers(slots, regions, data):
    values = data.draw(st.lists(NUMBERS, min_size=slots * regions, max_size=slots * regions))
    found = predict(read().predictor, np.array(values).reshape(slots, regions))
    assert found.shape == (AHEAD, regions) and np.isfinite(found).all() and (found >= 0).all()


def test_a_broken_predictor_gives_the_plain_forecast():
    history = np.arange(2.0 * SLOTS).reshape(SLOTS, 2)
    broken = Layers((np.full((2 * SLOTS, 2 * AHEAD), np.nan),), (np.zeros(2 * AHEAD),))
    assert (predict(broken, history) == forecast(history, AHEAD)).all()


def test_the_predictor_sees_a_trend():
    steady = np.full((SLOTS, 3), 50.0)
    assert accuracy(predict(read().predictor, steady), np.full((AHEAD, 3), 50.0)) > 0.9


def test_networks_are_small_say_how_they_were_made_and_are_read_back(tmp_path):
    networks = read()
    assert networks.body.weights[0].shape[0] == FEATURES
    assert str(networks.about["command"]).startswith("ctxflow train torta")
    target = tmp_path / "again.npz"
    write(networks, target)
    assert target.stat().st_size < 100_000
    again = read(target)
    assert again.about == networks.about
    for mine, theirs in zip(again.head.weights, networks.head.weights, strict=True):
        assert (mine == theirs).all()


def test_damaged_and_missing_files_are_told(tmp_path):
    target = tmp_path / "networks.npz"
    with pytest.raises(CtxflowError, match="ctxflow train torta"):
        read(target)
    target.write_bytes(b"no networks")
    with pytest.raises(CtxflowError, match="holds no networks"):
        read(target)
    np.savez(target, other=np.ones(2))
    with pytest.raises(CtxflowError, match="holds no networks"):
        read(target)
