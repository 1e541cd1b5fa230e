"""What makes a checkpoint true: attempts, manifests, the tracker, the journal, retention (DESIGN §4)."""
