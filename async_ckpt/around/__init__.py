"""Wrappers around the work of others: their functions, their files, their folders."""
