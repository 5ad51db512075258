"""A case compiled at a stage, on the reference backend, inside a rank's function."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import zerofx
from tests.models import Case
from zerofx.config import HookLimits

STAGES = (0, 1, 2, 3)
# The eager mode releases everything, fetches it again, and a few elements are worth a prefetch.
TIGHT = HookLimits(prefetch_elements=64, max_reuse_distance_elements=0, persistence_threshold_elements=0)


def compiled(case: Case, stage: int, *, seed: int = 0, backend: str = "aot_eager", **options: Any) -> nn.Module:
    return zerofx.compile(case.model(seed), stage=stage, backend=backend, **options)


@contextmanager
def at_stage(stage: int) -> Iterator[None]:
    """Name the stage in an error, and let the next stage compile from nothing."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"at stage {stage}: {type(error).__name__}: {error}") from error
    finally:
        torch._dynamo.reset()
