"""What the paper prints: Appendix B's statistics, which traces are generated to, and the figures beside ours."""

from __future__ import annotations

from ctxflow_papers.turboserve.traces import Statistics

TRACES = (
    Statistics("T1", (122, 130, 66, 22, 18), (44, 86, 88, 64, 38), (28.0, 56.2, 57.4, 37.4, 23.2)),
    Statistics("T2", (218, 214, 248, 192, 204), (60, 124, 204, 196, 204), (61.0, 118.6, 147.6, 154.2, 149.4)),
    Statistics("T3", (74, 148, 156, 264, 156), (10, 64, 126, 148, 214), (13.2, 49.4, 112.8, 121.4, 148.4)),
    Statistics("T4", (500, 428, 308, 88, 80), (158, 266, 388, 236, 152), (118.4, 219.2, 268.0, 162.8, 101.8)),
    Statistics("T5", (874, 862, 998, 762, 814), (238, 504, 810, 784, 814), (245.8, 475.2, 589.2, 616.8, 598.4)),
    Statistics("T6", (296, 590, 626, 1062, 618), (36, 260, 502, 608, 846), (54.4, 198.4, 451.4, 487.2, 592.0)),
)
"""Table 12."""
STUDY = Statistics("3.2", (31, 47, 30, 48, 44), (17, 24, 26, 39, 49), (10.36, 20.91, 19.30, 29.62, 33.49), 120.0)
"""Table 11."""
FIGURE_4 = {"migration": (26.53, 0.0), "autoscaling": (0.0, 32.57), "both": (8.17, 40.25)}
"""% less worst-case latency and % less cost than the base configuration on 8 GPUs."""
BASE = (0.71, 3.99)
"""The base configuration's worst-case latency in s and its cost in $."""
LATENCY_SAVED, COST_SAVED = 37.5, 37.2
WITHOUT = {"migration": 15.0, "autoscaling": 42.9}
"""% that leaving a mechanism out adds to the cost, on average (section 7.3)."""
ABOVE_DP, WORST_ABOVE_DP = 6.1, 8.3
TABLE_2 = {"T1": 4.7, "T2": 8.3, "T3": 5.5}
PLACEMENT_GAP = 3.6
VOLATILITIES = (0.86, 1.32, 1.92, 2.66, 3.15, 3.77, 4.39, 5.14, 5.51, 6.38)
ARRIVALS = (7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
PEAKS = (23, 27, 31, 35, 39, 43, 47, 51, 55, 59)
"""Table 5."""
UTILIZATIONS = (0.80, 0.80, 0.65, 0.65, 0.65, 0.50, 0.50, 0.50, 0.25, 0.25)
COSTS = (338.66, 369.35, 498.73, 526.14, 547.34, 700.77, 702.44, 705.05, 770.44, 769.46)
"""Table 6."""
ORACLE_UTILIZATIONS = (0.60, 0.88, 0.95, 0.72, 0.55, 0.55, 0.92, 0.55, 0.80, 0.55)
ORACLE_GPUS = (13, 5, 2, 8, 16, 16, 3, 16, 6, 16)
"""Tables 8 and 10."""
ORACLE_COST, OURS_COST = 3695.00, 3721.93
"""Table 9."""
