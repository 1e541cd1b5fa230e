"""The differences of two checkpoints.

- `diffing.py` is the word `diff` of the command. It finds the names in both checkpoints, and prints what differs.
- `tensor_differences.py` measures the difference of two tensors, piece by piece.
- `equality.py` tells whether two objects are equal, part by part.
"""
