"""Rows: what a batch job and a map read, from files and from tables in memory.

opening.py finds the reader that an input needs: for files of lines (formats.py, above text_lines.py), or for Arrow's
formats and tables in memory (tables.py). source.py says what rows are, columns.py which of them an app gets.
"""
