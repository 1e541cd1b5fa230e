"""A package, so that pytest leaves this folder off the path: its folders would be found in place of the frameworks."""
