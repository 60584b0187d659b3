"""The strategies of Lightning on this engine: `FSDPStrategy` for its Trainer, `FabricFSDPStrategy` for its Fabric.

Importing this module registers both under the name "fsdp_engine": "fsdp" is the name of Lightning's own strategy.
"""

from typing import Final

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning.pytorch.strategies import StrategyRegistry as TRAINER_STRATEGIES
except ImportError as missing:
    raise ImportError("fsdp.integrations.lightning needs the package lightning: pip install 'fsdp[lightning]'.") from missing

from fsdp.compat.frameworks.lightning_fabric import FabricFSDPStrategy
from fsdp.compat.frameworks.lightning_trainer import FSDPStrategy

__all__ = ["NAME", "FSDPStrategy", "FabricFSDPStrategy"]

NAME: Final = "fsdp_engine"
"""The name for `Trainer(strategy=...)` and `Fabric(strategy=...)`."""

TRAINER_STRATEGIES.register(NAME, FSDPStrategy, description=FSDPStrategy.__doc__, override=True)
FABRIC_STRATEGIES.register(NAME, FabricFSDPStrategy, description=FabricFSDPStrategy.__doc__, override=True)
