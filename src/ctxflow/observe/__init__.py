"""What happened in a run, seen afterwards: its history, its transfers, and reports and pictures of both; and while it
runs: how it stands (progress.py), how fast it goes (rates.py), and the file that tells others (status_file.py).

What does not live here: what a scheduler knows at the moment (executors/status.py), and the commands (cli/).
"""
