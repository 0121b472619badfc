"""The policies: small pure modules that decide, grouped by the idea that they carry out.

Nothing here knows the scheduler's internals or an engine. A site's own policies are added by entry point
(docs/extending.md).
"""
