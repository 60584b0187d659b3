"""Hugging Face Accelerate on this engine: `install` puts the engine in the place of torch's FSDP."""

from fsdp.compat.frameworks.accelerate import DOORS, PATCHES, Patch, install, uninstall

__all__ = ["DOORS", "PATCHES", "Patch", "install", "uninstall"]
