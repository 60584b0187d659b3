"""The random states of this process as plain data: Python's, numpy's if it is imported, torch's, and a device's."""

import random
import sys
from importlib.util import find_spec
from typing import Any

import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all random generators on the host and on `device`."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    # a program that has not imported numpy cannot have drawn from it
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state(legacy=False)
        state["state"] = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in state["state"].items()}
        states["numpy"] = state
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set all random generators to `states`. The device's is left alone if either `device` or the saved one is the host."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    if "numpy" in states and find_spec("numpy") is not None:
        import numpy

        numpy.random.set_state(states["numpy"])
