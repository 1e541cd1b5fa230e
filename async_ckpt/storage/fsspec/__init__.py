"""Object stores and whatever else fsspec knows, s3fs first."""
