"""The instant: from tensors to segments on the host; streams, events and the guard."""
