"""Weights: versions of a model's weights, which a training publishes and rollout engines load.

In: states. Out: versions, and replicas of them. Knows nothing of: trainers and engines.

`publishing/` contains the publisher and the subscriber, `following/` the sidecar of an engine. `delta.py` defines the
index of a version, and `lent.py` the table of a version in shared memory. `confined_files.py` accesses files below one
folder only, and `hf_checks.py` refuses models whose weights no engine can load.
"""
