"""Packed environments: Python and its packages as one file that unpacks and runs anywhere alike.

What lives here: `packing` (what `ctxflow env pack` does, with `inspection`, `collecting` and `libraries`), and
`opening`, the worker's half, which needs nothing but a Python of its own.
What does not: how the file travels (executors/), or which of the three ways a site takes (sites/).
"""
