"""What an accelerator can do: the only code that knows its API."""
