"""What the names of several engines need: other dtypes and devices after wrapping, and groups as they give them.

Start with instances.py, what wrapper classes have in common. dtype_and_device.py makes units anew, and plain_group.py makes one
group of several for the same ranks.
May use: every package below.
Must not: know which engine's names use it.
"""
