"""The face: what users call, beside the names of the package itself.

In: arguments of users. Out: calls of the core. Knows nothing of: wings.
"""
