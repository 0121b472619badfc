"""Packed environments: Python and its packages as one file that unpacks and runs anywhere alike.

`archiving` is what `ctxflow env pack` does, with `collecting` and `inspection`; `opening` is the worker's half, which
needs nothing but a Python of its own.
"""
