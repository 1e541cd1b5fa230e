"""Weights for rollout engines: versions of a model, published by a training and pulled by inference processes.

- `publisher.py`: `Publisher`, which a training calls; `publication.py` writes one version; `series.py`: the state kept
  between publications; `delta_base.py`: the weights that deltas are computed against; `difference.py`: the bytes of a
  delta.
- `versions.py`: the versions at a root, and which publisher owns it; `version_files.py`: the files of one version;
  `verify_versions.py`: which versions are sound.
- `subscriber.py`: `Subscriber`, which an engine calls; `live_weights.py` applies versions to weights in memory,
  `folder_replica.py` to weights in a folder (with `folder_notes.py`), `module.py` to a module.
- `of_ranks/`: versions of a model that is spread over ranks.
- `in_memory/`: the newest version of a publisher, or of all ranks, lent to processes of the same host.
- `base_model.py`: the model that the first delta at a root is against.
"""
