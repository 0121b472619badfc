"""Which hosts, workers and GPUs are bad, by what they were tried with: the policy `sequential` (docs/health.md)."""
