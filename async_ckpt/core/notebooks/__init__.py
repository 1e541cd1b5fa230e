"""The HTML by which notebooks show values of this library."""
