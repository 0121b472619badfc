"""Rows: what a batch job and a map read, from files and from tables in memory.

source.py says what a row is, readers.py reads files of lines, arrow_readers.py Arrow's formats, tables.py what a Python
program holds; columns.py is which columns an app's parameters get. What does not live here: what is done with rows
(batch/, mapping.py).
"""
