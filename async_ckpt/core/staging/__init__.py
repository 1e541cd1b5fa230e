"""Staging: from tensors at one instant to segments on the host.

`snapshot.py`: the staging of one save, from beginning to end; `tensors.py`: where its tensors lie; `filler.py`: which
bytes are copied at once and which later, and by which threads. `device.py`: the order of copies from one accelerator,
and raw copies; `side_stream.py`: its stream and buffers, kept between saves; `device_warm_up.py`: creates these before
the first save. `guard.py`: optimizers that wait for deferred copies; `tripwires.py`: detects tensors that changed
despite the guard. `file_segments.py`: files instead of tensors. `host_copy.py`: whole tensors on the host;
`held_snapshot.py`: `async_ckpt.snapshot`.
"""
