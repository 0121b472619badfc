"""The policies: small pure modules that decide, and the protocols that they implement.

A site's own are added by entry point (registry.py). Nothing here knows the scheduler's internals or an engine.
"""
