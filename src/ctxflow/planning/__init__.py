"""What `ctxflow plan` decides: which models on which tiers of a site, for a job, before anything runs.

`job_file` is what is asked, `job_problem` the placement problem made of it and of a site, with where each figure comes
from, `roofline` how fast a model should be where nobody measured it, and `workers` the workers that an answer takes.
"""
