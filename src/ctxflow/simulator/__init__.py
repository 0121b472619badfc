"""Experiments in virtual clusters: what the papers measured, measured again on ctxflow's own policies.

An experiment is a function that takes a `Request` and gives figures; `ctxflow reproduce` runs it by its paper's name.
"""
