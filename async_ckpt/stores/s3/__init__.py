"""Object stores through obstore: S3, Google Cloud Storage, Azure.

`store.py` is the storage. `sink.py` sends one object in parts: the segments of `upload_memory.py`.
`client.py` makes requests over `bucket_clients.py`, with the options of `settings.py`, `aws_settings.py` and
`azure_google_settings.py`; `error_translation.py` translates errors. `bucket_clients.py` also keeps forked children
from using the parent's threads.
"""
