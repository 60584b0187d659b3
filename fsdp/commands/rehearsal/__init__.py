"""Runs the engine for one choice of options on tensors without memory (torch's meta device), and says what it held and sent.

Start with rehearse.py, which runs two steps of rank 0. rehearsed_communicator.py sends nothing, so bytes and collectives are
those of the engine, and nothing here computes a layout. memory.py counts what the model holds. recall.py spares what torch
computes in Python again for each layer. clock.py turns what is run into seconds, with the numbers of hardware.py.
torch_groups.py is torch.distributed for the other dimensions of a job: meshes, and the collectives of torch's styles. pipeline.py
rehearses each stage of a pipeline (stage_passes.py), and says what a step of all stages takes.
May use: api, building, runtime (registry), params, comm, shards, device, errors.
Must not: need a process group.
"""
