"""What the paper prints: Figs. 5, 8, 9, 10, 11 (read off as its text has it) and its claims."""

from __future__ import annotations

METHODS = ("torta", "skylb", "sdib", "round_robin")
RESPONSE = {
    "abilene": (16.39, 18.72, 19.66, 21.50), "cost2": (19.31, 21.58, 22.51, 24.39),
    "gabriel": (17.58, 20.07, 21.10, 22.92), "polska": (19.19, 20.53, 21.53, 23.18),
}  # fmt: skip
"""Seconds, Fig. 8, of `METHODS`."""
POWER = {
    "abilene": (12.5, 14.3, 14.3, 14.7), "cost2": (11.1, 13.2, 13.2, 13.3), "gabriel": (10.7, 12.8, 12.8, 12.9),
    "polska": (14.1, 15.2, 15.2, 15.3),
}  # fmt: skip
"""Thousands of dollars, Fig. 9."""
OVERHEAD = {
    "abilene": (0.8, 2.9, 2.8, 3.7), "cost2": (2.7, 4.4, 4.3, 5.1), "gabriel": (1.3, 3.3, 3.2, 4.0),
    "polska": (2.3, 3.4, 3.4, 4.0),
}  # fmt: skip
"""Units of its own, Fig. 9."""
BALANCE = {
    "abilene": (0.765, 0.733, 0.735, 0.716), "cost2": (0.743, 0.714, 0.709, 0.688),
    "gabriel": (0.755, 0.729, 0.726, 0.708), "polska": (0.745, 0.715, 0.708, 0.686),
}  # fmt: skip
"""Fig. 10."""
WAITING_LESS = 50.0
"""% at least (section VI-C4): 0.3 to 1.1 s beside 1.2 to 2.4 s."""
MILP = {200: 0.5, 500: 1.8, 1000: 6.0, 2000: 22.0, 5000: 130.2}
"""Seconds, Fig. 5a."""
SURGE_WAIT = 15.7
"""Seconds that tasks wait on average while a reactive method scales up (section II-A)."""
MIGRATION, SWITCH = 30.7, 30.0
"""Seconds on a V100, Fig. 3a."""
EPS, S = 0.15, 2.5
"""The targets of training (Algorithm 2)."""
ACCURACIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ACCURACY_RESPONSE = {0.1: 20.5, 0.9: 17.5}
"""Seconds, Fig. 12, about."""
