"""The host: threads and memory, leased; what the machine has of them."""
