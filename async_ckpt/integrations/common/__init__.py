"""Folders of checkpoints, saves under way, guarded optimizers and versions of frameworks, for all integrations."""
