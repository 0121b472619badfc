"""What runs on a worker: the context host, which supervises, and the library process, which holds a context.

Imports nothing of ctxflow but context.py, and of others only the standard library and cloudpickle, so that a
worker needs almost nothing.
"""
