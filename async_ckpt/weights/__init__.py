"""Weights: versions of a model's weights that a training publishes, and that others follow.

In: states. Out: versions, and replicas of them. Knows nothing of: trainers and engines.
"""
