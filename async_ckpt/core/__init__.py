"""The core: all that a save and a load on a local disk need, with ranks.

In: calls of the face. Out: committed steps, and loaded states. Knows nothing of: wings.
"""
