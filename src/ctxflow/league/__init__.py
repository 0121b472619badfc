"""The league: every policy of a family, on the same public workloads, against bounds, ranked with intervals.

- `contests.py`: what is measured in each family, and on which workloads.
- `public_workloads.py`: the workloads of items, drawn by a seed; `fits.json`, what they are fitted to.
- `games.py`, `place_games.py`, `session_games.py`: a game, and what is measured of it; `lower_bounds.py`.
- `tournament.py`: all games, a process each; `ranking.py`; `league_page.py`, the page.
"""
