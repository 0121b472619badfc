"""Format figures and tables as text, and say what all pictures look like: colours and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence


def seconds(value: float) -> str:
    """Return a duration with three digits that count.

    >>> seconds(0.01234), seconds(12), seconds(1234.5)
    ('12.3 ms', '12.0 s', '1,234 s')
    """
    return f"{_three(value * 1e3)} ms" if value < 0.9995 else f"{_three(value)} s"


def figure(value: float | None) -> str:
    """Return a number with three digits that count.

    >>> figure(0.01234), figure(57), figure(12345.6), figure(None)
    ('0.0123', '57.0', '12,346', '-')
    """
    return "-" if value is None else _three(value)


def _three(value: float) -> str:
    if not value:
        return "0"
    return f"{value:,.{decimals(value)}f}"


def decimals(value: float) -> int:
    """Return how many decimals give a number three digits that count.

    >>> decimals(0.01234), decimals(9.999), decimals(57.0), decimals(1234.0), decimals(math.inf)
    (4, 1, 1, 0, 0)
    """
    if not value or not math.isfinite(value):
        return 0
    exponent = math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return max(0, 2 - exponent)


def even(values: Sequence[float | None]) -> list[str]:
    """Return numbers that stand in one column, with as many decimals each: the largest has three digits that count.

    >>> even([50.9, 0.0188, None, 57.0])
    ['50.9', '0.0', '-', '57.0']
    """
    places = min((decimals(value) for value in values if value), default=0)
    return ["-" if value is None else f"{value:,.{places}f}" for value in values]


def gpus_text(model: str | None, gpus: int) -> str:
    """Return a kind of worker in words.

    >>> gpus_text("NVIDIA A10", 1), gpus_text("NVIDIA A100", 4), gpus_text(None, 1), gpus_text(None, 0)
    ('NVIDIA A10', '4 x NVIDIA A100', 'GPU', 'no GPU')
    """
    if not gpus:
        return model or "no GPU"
    return (f"{gpus} x " if gpus > 1 else "") + (model or "GPU")


def span_unit(unit: str, hours: float) -> tuple[float, str]:
    """Return what hours are shown in, so that a short run has digits: how many an hour has, and the name.

    >>> span_unit("GPU-hours", 3.0), span_unit("GPU-hours", 0.02)
    ((1.0, 'GPU-hours'), (60.0, 'GPU-minutes'))
    """
    of = unit.removesuffix("hours")
    if hours >= 1:
        return 1.0, unit
    return (60.0, f"{of}minutes") if hours >= 1 / 60 else (3600.0, f"{of}seconds")


def percent(share: float) -> str:
    """Return a share of all, with a digit where it is small.

    >>> percent(0.873), percent(0.0123), percent(0.0)
    ('87 %', '1.2 %', '0 %')
    """
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or not share else f"{100 * share:.1f} %"


def shortened(name: str) -> str:
    """Return a name that fits a picture.

    >>> shortened("model.safetensors"), shortened("model-00001-of-00004.safetensors")
    ('model.safetensors', 'model-00001-of-00004.saf...')
    """
    return name if len(name) <= 28 else f"{name[:24]}..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return columns of text: the first to the left, the others to the right; a row that is shorter is a remark.

    :param words: how many columns are to the left.

    >>> print(table(["Calls", "count"], [["verify", "12"], ["a remark"]]))
    Calls   count
    verify     12
    a remark
    """
    full = [row for row in [heads, *rows] if len(row) == len(heads)]
    widths = [max(len(row[n]) for row in full) for n in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            cell.ljust(width) if n < words else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# Okabe and Ito's colours, which people of every colour vision tell apart, without yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE, DARK = "#7A7A7A", "#E4E4E4", "#222222"
WIDTH = 7.0  # Inches: a page's text.
STYLE = {
    "font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "",
    "text.parse_math": False,
    "axes.edgecolor": GREY, "xtick.color": DARK, "ytick.color": DARK, "axes.axisbelow": True,
}  # fmt: skip
