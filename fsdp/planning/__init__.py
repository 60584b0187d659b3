"""Says before a job starts what it will need: memory, communication and time, for each choice of options.

Start with plan.py, which compares choices. rehearsal.py runs the real engine for one choice, on tensors without memory (torch's
meta device) and over communicators that send nothing (communicator.py). So bytes and collectives are those of the engine, and
nothing here computes a layout. recall.py spares what torch computes in Python again for each layer. clock.py turns what is run
into seconds, with the numbers of hardware.py.
May use: api, reporting (the page), build, runtime (registry), params, comm, device, config, errors, file_errors.
Must not: need a process group.
"""
