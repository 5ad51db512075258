"""DeepSpeed ZeRO-3, where it is installed."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer


def shard(model: nn.Module, optimizer: Optimizer, precision: torch.dtype | None, *, reshard: bool) -> tuple[Any, Any]:
    """Return DeepSpeed's engine for a model, and the function that it put in the place of ``torch.nn.functional.linear``.

    With its defaults, or set to keep no parameter that it can gather again. It replaces that function for the whole process, which makes
    every compiled model beside it compile again, through DeepSpeed's code; so torch's own is put back.
    """
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
    plain = functional.linear
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    own, functional.linear = functional.linear, plain
    return engine, own


@contextmanager
def with_linear(own: Any) -> Iterator[None]:
    """Within, modules multiply as DeepSpeed has them do."""
    plain, functional.linear = functional.linear, own
    try:
        yield
    finally:
        functional.linear = plain
