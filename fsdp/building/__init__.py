"""Makes units and one engine from a module and its options, copies them, and takes them off. Never runs during training.

Start with choose_units.py, which chooses the units; consistency.py compares the plans of all ranks; builder.py makes the units,
attach.py the engine over them. copies.py and dissolve.py are the ways out: a second sharded model, or plain parameters.
May use: state_dict, runtime.uneven, runtime, debug, params, shards, comm, device, autograd, config, errors.
Must not: change a parameter before all ranks have agreed on the plan.
"""
