"""Weights: versions of a model's weights that a training publishes, and that others follow.

In: states. Out: versions, and replicas of them. Knows nothing of: trainers and engines.

`publishing/` has both sides, and `following/` the sidecar of an engine. `delta.py` is the index of a version, and
`lent.py` the table of weights in memory. `confined_files.py` writes below one folder alone, and `hf_checks.py` refuses
names that no engine understands.
"""
