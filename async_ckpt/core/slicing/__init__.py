"""The geometry of shards: which rectangles of a tensor a rank holds, writes and reads. No collective, no file.

- `slices.py`: rectangles, cuts and meshes; the rectangles that follow from a tensor's placements.
- `sharded.py`: the tensors of DTensor, FSDP1 and Megatron as such rectangles.
- `boxes.py`: boxes that overlap, and the bytes to copy from one box to another.
- `shares.py`: the part that each rank writes of a replicated tensor.
- `locator.py`: the ranks that wrote a part of a tensor, for a reader.
"""
