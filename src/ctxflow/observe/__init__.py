"""What happened in a run, seen afterwards: its history, its transfers, and reports and pictures of both.

What does not live here: what is going on at the moment (executors/status.py), and the command (cli/report.py).
"""
