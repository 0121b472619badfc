"""Draw the pictures of tiers: workers connected and items completed over time, and how long workers lived."""

from __future__ import annotations

from typing import Any

import numpy as np

from ctxflow.errors import counted
from ctxflow.observe.formatting import DARK, GREY, PALE, WIDTH, shortened
from ctxflow.observe.history import History, TierHistory

# Of Okabe and Ito's; vermilion is for evictions, and what is dark beside it is lost.
_SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_EVICTED = "#D55E00"
_OTHERS = "other tiers"
_POINTS = 700  # That can be told apart from left to right.


def unit_of(longest: float) -> tuple[float, str]:
    """Return seconds in the unit that fits an axis, and its name.

    >>> unit_of(90), unit_of(7200), unit_of(90000)
    ((1.0, 's'), (60.0, 'min'), (3600.0, 'h'))
    """
    for length, name in ((3600.0, "h"), (60.0, "min")):
        if longest > 5 * length:
            return length, name
    return 1.0, "s"


def shades(history: History) -> dict[str, str]:
    """Return the colour of each tier that had workers, those with the most worker time first, and of all others."""
    names = sorted(
        (name for name, tier in history.tiers.items() if tier.joined),
        key=lambda name: -history.tiers[name].worker_seconds,
    )
    colours = {name: _SHADES[n] if n < len(_SHADES) else GREY for n, name in enumerate(names)}
    return {**colours, _OTHERS: GREY}


# --- workers and items over time


def workers_and_items(figure_class: Any, history: History) -> Any:
    """Return workers connected above, completed items below, both stacked by tier, on one axis of time.

    In a run of sessions alone, their chunks are below.
    As the paper's Figures 6 and 7 have them.
    """
    figure = figure_class(figsize=(WIDTH, 4.2), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1.15, 1))
    length, unit = unit_of(history.duration)
    end = max(history.duration, 1e-3)
    colours = shades(history)
    counts = {name: history.tiers[name].counts for name in colours if name != _OTHERS}
    times = _thinned(np.unique([time for points in counts.values() for time, _ in points] + [0.0, end]))
    stacked = _folded({name: _steps(points, times) for name, points in counts.items()})
    labels = {name: shortened(name) for name in stacked} if len(stacked) > 1 else dict.fromkeys(stacked, "workers")
    _stack(above, times / length, stacked, colours, labels, step="post")
    _losses(above, history, length)
    above.set(xlim=(0, end / length), ylim=(0, max(history.peak_workers * 1.08, 1)), ylabel="workers connected")
    _items(below, history, end, length, colours)
    below.set_xlabel(f"time in the run ({unit})")
    for axes in (above, below):
        axes.grid(axis="both", color=PALE, linewidth=0.6)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.align_ylabels()
    handles = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False)
    return figure


def _thinned(times: Any) -> Any:
    """Return as many of the times as can be told apart in a picture."""
    return times if len(times) <= _POINTS else np.linspace(times[0], times[-1], _POINTS)


def _steps(points: list[tuple[float, int]], times: Any) -> Any:
    """Return what a count is at each of the times, when it changes at its points."""
    at = np.array([time for time, _ in points])
    return np.array([count for _, count in points])[np.searchsorted(at, times, side="right") - 1]


def _folded(series: dict[str, Any]) -> dict[str, Any]:
    """Return those that have no colour of their own, added up."""
    folded: dict[str, Any] = {}
    for n, (name, values) in enumerate(series.items()):
        key = name if n < len(_SHADES) else _OTHERS
        folded[key] = folded.get(key, 0) + values
    return folded


def _stack(
    axes: Any,
    times: Any,
    series: dict[str, Any],
    colours: dict[str, str],
    labels: dict[str, str] | None = None,
    step: str | None = None,
) -> None:
    """Draw areas one upon the other, with a line along the top of all."""
    total = np.zeros(len(times))
    drawn = "default" if step is None else f"steps-{step}"
    for name, values in series.items():
        label = labels[name] if labels is not None else None
        colour = colours[name]
        axes.fill_between(
            times, total, total + values, step=step, color=colour, alpha=0.75, linewidth=0, label=label, zorder=2
        )
        axes.plot(times, total, drawstyle=drawn, color="white", linewidth=0.6, zorder=2)
        total = total + values
    axes.plot(times, total, drawstyle=drawn, color=DARK, linewidth=0.9, zorder=3)


def _losses(axes: Any, history: History, length: float) -> None:
    for evicted, label, colour in ((True, "eviction", _EVICTED), (False, "worker lost", DARK)):
        step = max(history.duration, 1e-3) / _POINTS
        places = sorted({round(time / step) for time, kind in history.losses if kind is evicted})
        times = [place * step / length for place in places]
        if times:
            # Thin, so that many of them can be told apart.
            marks = {"marker": "|", "linestyle": "", "markersize": 7, "markeredgewidth": 0.6, "clip_on": False}
            axes.plot(times, [0.0] * len(times), color=colour, label=label, zorder=5, **marks)


def _items(axes: Any, history: History, end: float, length: float, colours: dict[str, str]) -> None:
    chunks = history.chunks > 0 and not history.items.done
    tiers = {name: history.tiers[name] for name in colours if name != _OTHERS}
    lines = {name: (tier.chunks if chunks else tier.done).cumulated() for name, tier in tiers.items()}
    ends = {name: np.minimum([time for time, _ in points], end) for name, points in lines.items()}
    times = _thinned(np.unique(np.concatenate([[0.0, end], *ends.values()])))
    items = {name: np.interp(times, ends[name], [count for _, count in points]) for name, points in lines.items()}
    _stack(axes, times / length, _folded(items), colours)
    most = history.chunks if chunks else history.items.done
    axes.set(ylim=(0, max(1, most * 1.06)), ylabel="chunks of sessions" if chunks else "completed items")


# --- lifetimes


def lifetimes(figure_class: Any, history: History) -> Any:
    """Return the share of each tier's workers that were evicted by an age, as `Tier.survival` estimates it."""
    figure = figure_class(figsize=(WIDTH, 2.9), layout="constrained")
    axes = figure.add_subplot()
    colours = shades(history)
    lost_some = [(name, history.tiers[name]) for name in colours if name != _OTHERS and history.tiers[name].lifetimes]
    shown = lost_some[: len(_SHADES)]
    longest = max(_oldest(tier) for _, tier in shown)
    length, unit = unit_of(longest)
    for name, tier in shown:
        points = [(0.0, 0.0), *tier.survival()]
        points.append((_oldest(tier), points[-1][1]))
        ages, shares = zip(*points, strict=True)
        label = f"{shortened(name)}: {tier.evicted:,} of {counted(tier.joined, 'worker')} evicted"
        axes.step(
            np.array(ages) / length, 100 * np.array(shares), where="post", color=colours[name], linewidth=1.7,
            label=label,
        )  # fmt: skip
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xlim=(0, 1.02 * longest / length), ylim=(0, 102), xlabel=f"time since the worker joined ({unit})")
    axes.set_ylabel("evicted by then (% of workers)")
    axes.grid(color=PALE, linewidth=0.6)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def _oldest(tier: TierHistory) -> float:
    return max(*tier.lifetimes, *tier.stays, 1e-3)
