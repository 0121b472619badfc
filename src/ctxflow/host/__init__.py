"""What runs on a worker: the context host, which supervises, and the library process, which holds a context.

What it is told and what it reports is in `messages`, `library_messages` and `vine_messages`. It imports of ctxflow what
every worker has (recipes, errors, pickling, topology), and of others only the standard library and cloudpickle, so that
a worker needs almost nothing.
"""
