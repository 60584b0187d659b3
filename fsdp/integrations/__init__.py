"""The names by which users import what is in compat/frameworks: `fsdp.integrations.lightning`, `fsdp.integrations.accelerate`.

Start with lightning.py, which registers the strategies of Lightning.
May use: compat.frameworks.
Must not: hold more than names.
"""
