"""TurboServe: where long-lived sessions go, and how many GPUs they want, by the time that their chunks take.

`session_placement` and `scaling` are the policies `turboserve` and `closed-loop` of a live run; the other modules are
the paper's functions on plain data, for simulations and policies of one's own (docs/scaling.md).
"""
