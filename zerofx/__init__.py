"""zerofx: ZeRO stages 0 to 3 as a compiler pass."""

from typing import TYPE_CHECKING, Any

from zerofx.errors import (
    CheckpointError,
    CompilerError,
    ConfigError,
    LossScaleError,
    MemoryLimitError,
    OffloadError,
    RankLostError,
    RankMismatchError,
    ShardingError,
    VerifyError,
    ZerofxError,
)

if TYPE_CHECKING:
    from zerofx.api import compile, no_sync, schedule
    from zerofx.checkpoint import load, load_safetensors, save
    from zerofx.config import Config, HookLimits, Imported
    from zerofx.construction import init
    from zerofx.estimates import Estimate, estimate
    from zerofx.full_state import full_state_dict
    from zerofx.gather import gathered
    from zerofx.lossscale import LossScale
    from zerofx.monitor import Monitor
    from zerofx.offload import Offload
    from zerofx.plans import Plan, plan
    from zerofx.render import Schedule
    from zerofx.scaler import GradScaler

__all__ = [
    "CheckpointError",
    "CompilerError",
    "Config",
    "ConfigError",
    "Estimate",
    "GradScaler",
    "HookLimits",
    "Imported",
    "LossScale",
    "LossScaleError",
    "MemoryLimitError",
    "Monitor",
    "Offload",
    "OffloadError",
    "Plan",
    "RankLostError",
    "RankMismatchError",
    "Schedule",
    "ShardingError",
    "VerifyError",
    "ZerofxError",
    "compile",
    "estimate",
    "full_state_dict",
    "gathered",
    "init",
    "load",
    "load_safetensors",
    "no_sync",
    "plan",
    "save",
    "schedule",
]
__version__ = "0.1.0"
_HOMES = {
    "Config": "zerofx.config",
    "Estimate": "zerofx.estimates",
    "GradScaler": "zerofx.scaler",
    "HookLimits": "zerofx.config",
    "Imported": "zerofx.config",
    "LossScale": "zerofx.lossscale",
    "Monitor": "zerofx.monitor",
    "Offload": "zerofx.offload",
    "Plan": "zerofx.plans",
    "Schedule": "zerofx.render",
    "estimate": "zerofx.estimates",
    "gathered": "zerofx.gather",
    "init": "zerofx.construction",
    "full_state_dict": "zerofx.full_state",
    "load": "zerofx.checkpoint",
    "load_safetensors": "zerofx.checkpoint",
    "plan": "zerofx.plans",
    "save": "zerofx.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import on first use: Dynamo, AOTAutograd and DTensor cost more than torch itself."""
    if name not in __all__:
        raise AttributeError(f"module 'zerofx' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "zerofx.api")), name)
