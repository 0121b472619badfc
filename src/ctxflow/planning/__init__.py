"""What `ctxflow plan` decides: which models on which tiers of a site, for a job, before anything runs."""
