"""Objects on one side, named tensors and a skeleton of plain values on the other."""
