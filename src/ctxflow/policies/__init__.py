"""The policies: small pure modules that decide, grouped by the idea that they carry out.

`protocols` and `views` say what a policy is and what it sees, `registry` finds it by name, `helpers` has what several
of them need. `simple` holds what needs no tuning, `opportunistic` batches for workers that may be evicted, `baselines`
what TORTA is compared with; `torta`, `turboserve`, `agh` and `flextopo` are the papers' methods, and `health` finds bad
hosts. A site's own are added by entry point (docs/extending.md). Nothing here knows the scheduler's internals or an
engine.
"""
