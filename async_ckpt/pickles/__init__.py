"""Pickles that may be anybody's: their programs are followed, and nothing that they name is made or called.

Open `machine` for the stack that a program works on, and which instructions there are; `saved_objects` for reading back
what `torch.save` wrote, or refusing it; `object_digests` for comparing objects of several ranks. `format.dcp` reads the
metadata of torch.distributed.checkpoint by the same machine.

Knows nothing of: archives, files, checkpoints.
"""
