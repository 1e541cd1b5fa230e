"""Weights for rollout engines: versions of a model, published by a training and pulled by whoever generates with it."""
