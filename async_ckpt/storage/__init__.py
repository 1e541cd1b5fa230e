"""Places: where archives, manifests and trackers are written, listed and read."""
