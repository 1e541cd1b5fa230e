"""Other projects' ways of calling: one module for each, imported on use."""
