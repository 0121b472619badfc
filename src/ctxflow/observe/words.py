"""Figures and tables in words: what all text of a report is made of."""

from __future__ import annotations

from collections.abc import Sequence


def seconds(value: float) -> str:
    """A duration with three digits that count.

    >>> seconds(0.01234), seconds(12.34), seconds(1234.5)
    ('12.3 ms', '12.3 s', '1,234 s')
    """
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def figure(value: float | None) -> str:
    """A number with three digits that count.

    >>> figure(0.01234), figure(12345.6), figure(None)
    ('0.0123', '12,346', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def shortened(name: str) -> str:
    """A name that fits a picture.

    >>> shortened("model.safetensors"), shortened("model-00001-of-00004.safetensors")
    ('model.safetensors', 'model-00001-of-00004.saf...')
    """
    return name if len(name) <= 28 else f"{name[:24]}..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Columns of text: the first to the left, the others to the right; a row that is shorter is a remark.

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
