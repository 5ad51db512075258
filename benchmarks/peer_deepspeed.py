"""DeepSpeed ZeRO-3, where it is installed."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def shard(model: nn.Module, optimizer: Optimizer, precision: torch.dtype | None, *, reshard: bool) -> Any:
    """Return DeepSpeed's engine for a model, with its defaults, or set to keep no parameter that it can gather again."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # as its launcher does
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    zero: dict[str, Any] = {"stage": 3}
    if reshard:
        # by default it keeps up to 1e9 parameters whole, which is all of a small model
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only names the batch; it is not used
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default it clips, and nobody else here does
        "bf16": {"enabled": precision is torch.bfloat16},
    }
    assert dist.is_initialized()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
