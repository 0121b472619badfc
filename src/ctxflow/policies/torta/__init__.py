"""TORTA: which region and which worker take which call, and how many workers are active.

`routing` and `scaling` are the policies `torta` and `activation` of a live run; the other modules are the paper's
functions on arrays, for simulations and policies of one's own (docs/routing.md).
"""
