"""Agreement: what makes a checkpoint true."""
