"""The experiments of five papers on ctxflow's policies, for `ctxflow reproduce`.

Each package has a paper's experiments, what they take for granted, and its pictures; its `EXPERIMENT` is what ctxflow
finds by the entry point group `ctxflow.experiments`. They use ctxflow, which never uses them.
"""
