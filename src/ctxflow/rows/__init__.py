"""Rows: what a batch job and a map read, from files and from tables in memory.

source.py says what a row is, files.py has the lines of files, readers.py and text_lines.py make rows of them,
arrow_readers.py of Arrow's formats, folders.py of several files, tables.py of what a Python program holds; columns.py
is which columns an app's parameters get. What does not live here: what is done with rows (batch/, mapping.py).
"""
