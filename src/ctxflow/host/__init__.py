"""What runs on a worker: the context host, which supervises, and the library process, which holds a context.

Their messages are in `messages` and `library_messages`. It imports of ctxflow what every worker has (recipes, errors,
pickling, topology), and of others only the standard library and cloudpickle, so that a worker needs almost nothing.
"""
