"""Folders of checkpoints, guarded optimizers and versions of frameworks, for all integrations of trainers."""
