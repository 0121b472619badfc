"""Observe runs: how they stand while they go on (progress.py), and what happened in them, as reports and pictures."""
