"""A run: the shell around the scheduler that drives an engine, and answers who waits (live_run.py, run_loop.py)."""
