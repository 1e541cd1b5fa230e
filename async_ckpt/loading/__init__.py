"""A load, told once: from a path to tensors."""
