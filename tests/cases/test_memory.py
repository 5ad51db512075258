"""What stays in memory between the passes of a step, by stage."""

import gc

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.cases.places import Place, wrong
from tests.ranks import Pool

_LAYERS, _WIDTH = 4, 64


def held_bytes() -> int:
    """Bytes of all storages that are as large as a shard."""
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor) and not isinstance(found, DTensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for size in storages.values() if size >= _WIDTH * _WIDTH)


def states_between_passes(place: Place) -> list[str]:
    """Each stage holds what it says: parameters, their whole copies, and gradients that were not synchronised (76, 79)."""
    gc.collect()
    before = held_bytes()
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
    whole = _LAYERS * _WIDTH * _WIDTH * 4
    model = zerofx.compile(model, stage=place.stage, backend=place.backend)
    x = torch.ones(2, _WIDTH)
    with zerofx.no_sync(model):
        model(x).sum().backward()
    gc.collect()
    expected = whole // place.world + (whole if place.stage < 3 else 0) + (whole if place.stage == 1 else whole // place.world)
    found = held_bytes() - before
    model.zero_grad()
    with torch.no_grad():
        model(x)
    gc.collect()
    after = held_bytes() - before
    wanted = whole // place.world + (whole if place.stage < 3 else 0)
    return [
        *([] if found == expected else [f"{found} bytes after a backward instead of {expected}"]),
        *([] if after == wanted else [f"{after} bytes after a forward without gradients instead of {wanted}"]),
    ]


def test_each_stage_holds_less(ranks: Pool) -> None:
    places = tuple((stage, "aot_eager") for stage in (1, 2, 3))
    assert wrong(ranks, states_between_passes, world=4, places=places) == []
