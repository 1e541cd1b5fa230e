"""The geometry of shards: which rectangles of a tensor a rank holds, writes and reads. No collective, no file.

- `slices.py`: rectangles, cuts and meshes; the rectangles given by a tensor's placements.
- `sharded.py`: DTensors, and the sharded tensors of FSDP1 and Megatron, as such rectangles.
- `boxes.py`: overlapping boxes, and the bytes to copy from one box to another.
- `shares.py`: the part that each rank writes of a replicated tensor.
- `locator.py`: which ranks wrote a part of a tensor, for readers.
"""
