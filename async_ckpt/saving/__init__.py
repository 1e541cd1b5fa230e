"""A save, told once: from the call to the handle, and from the handle to a commit."""
