"""The differences of two checkpoints.

- `diffing.py` is the subcommand `diff`. It pairs the names of both checkpoints, and prints the differences.
- `tensor_differences.py` measures the difference of two tensors, piece by piece.
- `equality.py` compares two objects, part by part.
"""
