"""How ctxflow's own suite is run: what it costs, in which depth, in which order."""
