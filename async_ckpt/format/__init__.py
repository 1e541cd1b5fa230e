"""The archive as bytes: pure code, no torch, no file, no clock."""
