"""What the paper on GH and AGH prints in its tables, transcribed."""

from __future__ import annotations

from ctxflow_papers.gh_agh.experiments import SHAPES

BUDGETS = {
    ("S1", "gh"): (None, 145.8, None),
    ("S1", "agh"): (None, 145.8, None),
    ("S2", "gh"): (63.1, 314.4, 1.5),
    ("S2", "agh"): (53.8, 136.6, 0.6),
    ("S3", "gh"): (63.1, 1162.0, 14.2),
    ("S3", "agh"): (35.5, 343.0, 3.7),
    ("S4", "gh"): (63.1, 964.0, 1.5),
    ("S4", "agh"): (53.8, 140.0, 0.6),
    ("S5", "gh"): (63.1, 1811.0, 14.2),
    ("S5", "agh"): (35.5, 344.0, 3.7),
}
"""Table 2: payment in $, cost in $, violations in %. S1 is the note under it."""

ABLATION = {"": (89.88, 1.0), "M1": (None, 0.0), "M2": (134.52, 1.0), "M3": (None, 0.0)}
"""Table 3: cost in $, and 1 for feasible."""

WITHOUT_M2 = 49.7
"""Table 3, in % of the cost with it: the paper rounds it to more than 50."""

RUNTIMES = {
    "exact": dict(zip(SHAPES, (0.39, 4.2, 13.04, 601.12, 600.0), strict=True)),
    "gh": dict(zip(SHAPES, (0.01, 0.01, 0.3, 0.5, 0.9), strict=True)),
    "agh": dict(zip(SHAPES, (0.0149, 0.113, 0.57, 1.09, 2.3), strict=True)),
}
"""Table 5, in s. The last of the exact method is "> 600", the first two of GH "< 0.01"."""

ROLLING = {
    "dm_24h": ((381, 2), (447, 75), (507, 178), (793, 529), (909, 509)),
    "gh_24h": ((468, 3), (471, 6), (475, 12), (472, 5), (498, 44)),
    "agh_24h": ((414, 2), (418, 8), (430, 30), (525, 214), (564, 173)),
    "agh_5min": ((414, 2), (420, 12), (432, 24), (434, 23), (474, 56)),
}
"""Table 4: mean and standard deviation in $ by volatility."""
