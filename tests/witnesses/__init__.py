"""Folders that earlier code has written, kept as they were: today's code must read, verify, resume and repair them."""
