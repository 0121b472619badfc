"""What all pictures look like: colours and sizes."""

from __future__ import annotations

# Okabe and Ito's colours, which people of every colour vision tell apart, without yellow, which is pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, PALE, DARK = "#7A7A7A", "#E4E4E4", "#222222"
WIDTH = 7.0  # Inches: a page's text.
STYLE = {
    "font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "",
    "text.parse_math": False,
    "axes.edgecolor": GREY, "xtick.color": DARK, "ytick.color": DARK, "axes.axisbelow": True,
}  # fmt: skip
