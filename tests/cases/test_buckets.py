"""Sizes of buckets and what overlaps change no bit."""

from typing import Any

import pytest
import torch

import zerofx
from tests.models import SMOOTH_MLP
from tests.ranks import Pool
from tests.reference import Trace, drift, train
from tests.stages import TIGHT, at_stage
from zerofx.config import Config

SIZES: tuple[dict[str, Any], ...] = (
    {"bucket_max_bytes": 1, "bucket_min_bytes": 0, "prefetch_buckets": 0, "reduces_in_flight": 0},
    {"bucket_max_bytes": 1, "bucket_min_bytes": 0, "prefetch_buckets": 2, "reduces_in_flight": 2},
    {"bucket_max_bytes": 400, "bucket_min_bytes": 0, "prefetch_buckets": 1, "reduces_in_flight": 1},
    {},
)


def train_with_sizes(rank: int, world: int, stage: int, backend: str) -> list[Trace]:
    traces = []
    for sizes in SIZES:
        with at_stage(stage):
            settings = Config(stage=stage, backend=backend, hooks=TIGHT, **sizes)
            traces.append(train(zerofx.compile(SMOOTH_MLP.model(), config=settings), SMOOTH_MLP, rank, world, steps=4))
    return traces


@pytest.mark.parametrize(("stage", "backend"), [(1, "aot_eager"), (3, "aot_eager"), (3, "hooks")])
def test_bits_do_not_depend_on_buckets(ranks: Pool, stage: int, backend: str) -> None:
    """A sum of two ranks has no order (80)."""
    for traces in ranks.run(train_with_sizes, 2, stage, backend):
        assert drift(traces) == []
        assert len({tuple(trace.losses) for trace in traces}) == 1


def mesh_of_one(rank: int, world: int) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    try:
        zerofx.compile(torch.nn.Linear(4, 4), mesh=mesh, backend="aot_eager")
    except zerofx.ConfigError as error:
        return str(error)
    return "no error"


def test_a_mesh_of_one_rank_among_several_is_refused(ranks: Pool) -> None:
    """It would train each rank apart, without a word (19)."""
    for rank, text in enumerate(ranks.run(mesh_of_one, 2)):
        assert f"the mesh [{rank}] has one of 2 ranks" in text
