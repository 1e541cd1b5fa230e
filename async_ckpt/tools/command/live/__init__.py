"""The words of the command that go on until they are ended."""
