"""Untrusted pickles: their programs are interpreted, and nothing that they name is created or called.

- `machine` has the stack that a program works on, and the instructions; it can record the structure of each object.
- `saved_objects` loads the output of `torch.save`, or refuses it.
- `object_digests` compares objects of several ranks.

`face.foreign.dcp_metadata` reads the metadata of torch.distributed.checkpoint by the same machine.

Knows nothing of: archives, files, checkpoints.
"""
