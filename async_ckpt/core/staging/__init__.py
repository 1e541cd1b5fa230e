"""The instant: from tensors to segments on the host.

`snapshot.py`: the staging of one save, from beginning to end; `tensors.py`: where its tensors lie; `filler.py`: which
bytes are copied at once and which later, and by which threads. `device.py`: the order of copies from one accelerator,
and raw copies; `side_stream.py`: its stream and buffers, kept between saves; `device_warm_up.py`: these, made ahead of
the first save. `guard.py`: optimizers that wait for deferred copies; `tripwires.py`: tensors that changed in spite of
that. `file_segments.py`: files in the place of tensors. `host_copy.py`: whole tensors on the host; `held_snapshot.py`:
`async_ckpt.snapshot`.
"""
