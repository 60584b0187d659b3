"""Makes units and one engine from a module and its options. Runs when a model is wrapped and never again.

Start with plan.py, which chooses the units; consistency.py compares the plans of all ranks; builder.py makes the units.
May use: state_dict, runtime, debug, params, shards, comm, device, autograd, config, errors.
Must not: change a parameter before all ranks have agreed on the plan.
"""
