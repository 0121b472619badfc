"""Rows: what a batch job and a map read, from files and from tables in memory."""
