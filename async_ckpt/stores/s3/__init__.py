"""Object stores through obstore: S3, Google Cloud Storage, Azure.

`store.py` is the storage. `sink.py` sends one object: the segments of `segments.py`, in the parts of `plan.py`.
`client.py` makes requests over `connections.py`, with the options of `settings.py`, `aws.py` and `azure_google.py`;
`refusals.py` translates their errors. `runtime.py` keeps forked children from using the parent's threads.
"""
