"""The state of optimizers on disk: the same training, in less memory, and what happens when the disk fails."""

import copy
import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import zerofx
from tests.models import GPT, ODD_SIZES
from tests.ranks import Pool
from tests.reference import backward
from tests.stages import at_stage, compiled
from zerofx.config import Config
from zerofx.disk import Disk
from zerofx.errors import ConfigError, OffloadError, RankMismatchError, ShardingError, ZerofxError
from zerofx.hardware import hardware
from zerofx.mapped import MappedFile, MappedTensors, Region
from zerofx.module import runtime_of
from zerofx.offload import STATES, Offload
from zerofx.streaming import windows

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.01),  # it has its state before the first step
}


def tight(directory: Path) -> dict[str, Any]:
    """Everything but scalars is in the file, and few parameters fit a window."""
    return {**dict.fromkeys(STATES, f"disk:{directory}"), "min_bytes": 1, "window_bytes": 2000}


def disk_of(model: nn.Module) -> Disk:
    found = runtime_of(model).disk
    assert found is not None
    return found


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's parameters and optimizer state, by name."""
    found = {}
    for name, tensor in model.named_parameters():
        found[name] = local(tensor.detach()).clone()
        found.update({f"{name}.{key}": local(value).clone() for key, value in optimizer.state.get(tensor, {}).items()})
    return found


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first.keys() | second.keys() if name not in first or name not in second or not first[name].equal(second[name])]


def in_memory(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The state tensors, shards and gradients that are not in a file."""
    runtime, held = runtime_of(model), {tensor for group in optimizer.param_groups for tensor in group["params"]}
    every = [(key, value) for state in optimizer.state.values() for key, value in state.items() if isinstance(value, Tensor)]
    cut = [param.index for param in runtime.params if param.dim is not None or param.world_size == 1]
    every += [("a shard", runtime.tensors[index]) for index in cut if runtime.tensors[index] in held]
    every += [("a gradient", grad) for index in cut if (grad := runtime.tensors[index].grad) is not None]
    mapped = disk_of(model).tensors
    return [f"{key} {tuple(value.shape)}" for key, value in every if value.ndim and value.numel() and local(value) not in mapped]


def test_windows() -> None:
    assert list(windows([], 10)) == []
    assert list(windows([4, 4, 4, 12, 0, 10, 0], 10)) == [range(0, 2), range(2, 3), range(3, 4), range(4, 7)]
    assert list(windows([0, 0], 10)) == [range(0, 2)]


def test_settings_are_read_and_written(tmp_path: Path) -> None:
    config = Config(offload={"optimizer": "disk:/mnt/scratch", "min_bytes": "1MiB"})
    assert config.offload == Offload(optimizer="disk:/mnt/scratch", min_bytes=2**20)
    for suffix, text in (("toml", config.to_toml()), ("json", config.to_json())):
        path = tmp_path / f"settings.{suffix}"
        path.write_text(text)
        assert Config.from_file(path) == config
    (tmp_path / "short.toml").write_text('offload = "optimizer"')
    short = Config.from_file(tmp_path / "short.toml").offload
    assert isinstance(short, Offload)
    assert short == Offload(optimizer="disk")
    assert short.directory("optimizer") == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("offload", "named"),
    [
        ({"optimizer": "disk:/tmp", "buffers": "cpu"}, "buffers"),
        ({"optimizer": "cpu"}, "'cpu'"),
        ({"optimizer": "disk:"}, "'disk:'"),
        ({"optimizer": 1}, "optimizer=1"),
        ({"min_bytes": 5}, "nothing is offloaded"),
        ({"optimizer": "disk", "min_bytes": 0}, "min_bytes=0"),
        ({"optimizer": "disk", "window_bytes": "much"}, "window_bytes='much'"),
        ({"optimizer": "disk:/no/such/directory"}, "/no/such/directory"),
        ("buffers", "buffers"),
        (3, "3"),
    ],
)
def test_what_cannot_be_offloaded_is_told_by_name(offload: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        zerofx.compile(nn.Linear(2, 2), backend="hooks", offload=offload)
    assert named in str(caught.value)
    assert all((caught.value.what, caught.value.where, caught.value.why, caught.value.remedy))
    with pytest.raises(ConfigError, match="'cuda' is not offloaded"):
        Offload(optimizer="disk").check("cuda")


def train_alike(rank: int, world: int, directory: Path, modes: tuple[tuple[str, int], ...]) -> list[str]:
    """Train with and without offload: bitwise the same, with all state in files; on shards that are uneven, and some empty."""
    found = []
    for backend, stage in modes:
        with at_stage(stage):
            models = [compiled(ODD_SIZES, stage, backend=backend, offload=offload) for offload in (None, tight(directory))]
            for name, make in OPTIMIZERS.items():
                optimizers = [make(model.parameters()) for model in models]
                for step in range(2):
                    for model, optimizer in zip(models, optimizers, strict=True):
                        for batch in range(1 + step):
                            backward(model, ODD_SIZES, ODD_SIZES.batch(batch).part(rank, world), world)
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        if model is models[1] and step and stage:
                            found += [f"{backend}, {stage}, {name}: {key} in memory" for key in in_memory(model, optimizer)]
                        optimizer.step()
                        optimizer.zero_grad()
                states = map(state_of, models, optimizers)
                found += [f"{backend}, {stage}, {name}: {which} differs" for which in differing(*states)]
                found += [f"{backend}, {stage}, {name}: {key} is in memory" for key in in_memory(models[1], optimizers[1])]
    return found


@pytest.mark.parametrize(
    ("world", "modes"),
    [(2, (("hooks", 1), ("hooks", 3), ("hooks", 0))), (2, (("aot_eager", 2), ("aot_eager", 3))), (1, (("aot_eager", 3), ("hooks", 2)))],
    ids=["hooks", "compiled", "alone"],
)
def test_training_is_bitwise_the_same(ranks: Pool, tmp_path: Path, world: int, modes: Any) -> None:
    assert ranks.run(train_alike, world, tmp_path, modes) == [[]] * world


class Sign(Optimizer):
    """Nothing says that this optimizer treats each parameter by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for tensor in group["params"]:
            average = self.state[tensor].setdefault("average", torch.zeros_like(tensor))
            tensor.sub_(average.add_(tensor.grad).sign(), alpha=0.01)


def halve(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.grad.mul_(0.5)


def other_ways(rank: int, world: int, directory: Path) -> list[str]:
    """Steps with closures and hooks, groups, later parameters, other optimizers, and state that comes from elsewhere."""
    found = []

    def pair() -> list[nn.Module]:
        return [compiled(GPT, 2, backend="hooks", offload=offload) for offload in (None, tight(directory))]

    def go(model: nn.Module, optimizer: Optimizer, step: int, **how: Any) -> None:
        backward(model, GPT, GPT.batch(step).part(rank, world), world)
        optimizer.step(**how)
        optimizer.zero_grad()

    def check(what: str, models: list[nn.Module], optimizers: list[Optimizer], *, steps: int = 2, **how: Any) -> None:
        for step in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                go(model, optimizer, step, **how)
        found.extend(f"{what}: {name}" for name in differing(*map(state_of, models, optimizers)))
        found.extend(f"{what}: {name} in memory" for name in in_memory(models[1], optimizers[1]))

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [tensor], "lr": 0.01 / (1 + place)} for place, tensor in enumerate(model.parameters())]

    models = pair()
    adams = [torch.optim.AdamW(groups(model), foreach=True) for model in models]
    for adam in adams:  # a hook of the optimizer's own comes before the first window
        adam.register_step_pre_hook(halve)
    check("groups and a hook", models, adams)
    loaded = pair()
    others = [torch.optim.AdamW(groups(model)) for model in loaded]
    for adam, other in zip(adams, others, strict=True):
        other.load_state_dict(adam.state_dict())
    check("state loaded", loaded, others)

    models = pair()
    closed = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
    for model, optimizer in zip(models, closed, strict=True):

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            return backward(model, GPT, GPT.batch(0).part(rank, world), world)

        for tensor in list(model.parameters())[:3]:
            tensor.requires_grad_(False)
        found += [] if isinstance(optimizer.step(closure), float) else ["a closure's loss is lost"]
        for tensor in model.parameters():
            tensor.requires_grad_(True)
    check("a closure, and parameters that train later", models, closed)

    models = pair()
    check("a third party's", models, [Sign(model.parameters()) for model in models])
    models = pair()
    check("Muon", models, [torch.optim.Muon([tensor for tensor in model.parameters() if tensor.ndim == 2]) for model in models])
    models = pair()
    plain = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    check("no state", models, plain)
    for optimizer in plain:
        optimizer.param_groups[0]["momentum"] = 0.5
    check("state from a later step on", models, plain, steps=3)
    try:
        torch.optim.LBFGS(models[1].parameters()).step(lambda: 0.0)
        found.append("LBFGS is not refused")
    except ConfigError as error:
        found += [] if "LBFGS" in error.what else [str(error)]
    return found


def test_other_optimizers_and_ways_to_step(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(other_ways, 2, tmp_path) == [[]] * 2


def skip_and_save(rank: int, world: int, directory: Path) -> list[str]:
    """An overflow changes nothing; a checkpoint goes from a model with offload to one without, and back."""
    case, found = GPT, []
    model = compiled(case, 3, backend="hooks", offload=tight(directory))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = zerofx.GradScaler(zerofx.LossScale(initial_scale=8.0), device="cpu")
    kept = [state_of(model, optimizer)]
    for step in range(3):
        batch = case.batch(step).part(rank, world)
        loss = case.loss(model(*batch.inputs), batch.target, world)
        scaler.scale(loss * (1e38 if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept.append(state_of(model, optimizer))
    changes = [bool(differing(*states)) for states in pairwise(kept)]
    found += [] if changes == [True, False, True] else [f"steps that change anything: {changes}"]
    for step, offload in enumerate((None, tight(directory))):
        zerofx.save(directory / str(step), model, optimizer)
        other = compiled(case, 3, seed=1, backend="hooks", offload=offload)
        anew = OPTIMIZERS["adamw"](other.parameters())
        zerofx.load(directory / str(step), other, anew)
        found += [f"loaded: {name}" for name in differing(state_of(model, optimizer), state_of(other, anew))]
        for one, theirs in ((model, optimizer), (other, anew)):
            backward(one, case, case.batch(step).part(rank, world), world)
            theirs.step()
            theirs.zero_grad()
        found += [f"trained on: {name}" for name in differing(state_of(model, optimizer), state_of(other, anew))]
        found += [] if offload is None else in_memory(other, anew)
        model, optimizer = other, anew
    return found


def test_an_overflow_and_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(skip_and_save, 2, tmp_path) == [[]] * 2


def build_on_disk(rank: int, world: int, directory: Path) -> list[str]:
    """Build with shards that go to disk at once: the weights of a plain model, where compile finds them; the model can be copied."""
    found, offload = [], {"parameters": f"disk:{directory}", "min_bytes": 1}
    with zerofx.init(offload=offload):
        model = ODD_SIZES.model()
    plain = ODD_SIZES.model()
    zerofx.compile(model, stage=3, backend="aot_eager", offload=offload)
    with zerofx.gathered(model) as wholes:
        found += [name for name, value in plain.named_parameters() if not value.equal(wholes[name])]
    loss = backward(model, ODD_SIZES, ODD_SIZES.batch(0).part(rank, world), world)
    model.zero_grad()
    copied = copy.deepcopy(model)
    found += [] if backward(copied, ODD_SIZES, ODD_SIZES.batch(0).part(rank, world), world) == loss else ["the copy's loss"]
    for each in (model, copied):
        found += in_memory(each, torch.optim.SGD(each.parameters()))
    return [name for name in found if not name.startswith("a gradient")]


def test_init_builds_on_disk(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(build_on_disk, 2, tmp_path) == [[]] * 2


def build_alone(rank: int, world: int, directory: Path) -> list[str]:
    """One process that has no process group builds, fills and trains like a model that was there before."""
    plain, found = compiled(ODD_SIZES, 3, backend="hooks"), []
    with zerofx.init(offload=tight(directory)):
        built = ODD_SIZES.model()
    compiled_later = zerofx.compile(built, stage=3, backend="hooks", offload=tight(directory))
    filled = compiled(ODD_SIZES, 3, seed=1, backend="hooks", offload=tight(directory))
    with zerofx.init(filled), torch.no_grad():
        for tensor, other in zip(filled.parameters(), ODD_SIZES.model().parameters(), strict=True):
            tensor.copy_(other)
    models = [plain, compiled_later, filled]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, ODD_SIZES, ODD_SIZES.batch(0), world)
        optimizer.step()
    states = [state_of(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for other in states[1:]:
        found += differing(states[0], other)
    return found


def test_one_process_without_a_group_builds_on_disk(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(build_alone, 1, tmp_path, group=False) == [[]]


def accumulate_and_keep(rank: int, world: int, directory: Path) -> list[str]:
    """Gradients that somebody still has stay what they are; those that are not reset add up, on disk; zeroed ones too."""
    found = []
    for backend in ("hooks", "aot_eager"):
        model, plain = (compiled(GPT, 3, backend=backend, offload=offload) for offload in (tight(directory), None))
        both, held, copies = (model, plain), list[Tensor](), list[Tensor]()
        for step in range(3):
            for each in both:
                backward(each, GPT, GPT.batch(step).part(rank, world), world)
            if step == 0:
                held = [local(tensor.grad) for tensor in model.parameters()]
                copies = [tensor.clone() for tensor in held]
                model.zero_grad()
                plain.zero_grad()
            found += [
                f"{backend}, step {step}: {name}"
                for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
                if one.grad is not None and not local(one.grad).equal(local(other.grad))
            ]
        changed = [one for one, other in zip(held, copies, strict=True) if not one.equal(other)]
        found += [f"{backend}: a gradient that was kept has changed"] if changed else []
        for each in both:
            each.zero_grad(set_to_none=False)
            backward(each, GPT, GPT.batch(0).part(rank, world), world)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found += [f"{backend}: after zeros" for one, other in pairs if not local(one.grad).equal(local(other.grad))]
    return found


def test_gradients_on_disk_add_up(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(accumulate_and_keep, 2, tmp_path) == [[]] * 2


def test_loads_stand_in_front_of_gathers_and_stores_behind_reductions() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    machine = replace(hardware("h100"), disk_bytes_per_s=1e9)
    settings: Any = {"world_size": 2, "stage": 3, "hardware": machine, "bucket_min_bytes": 0}
    found = zerofx.plan(model, (torch.ones(4, 64),), offload={**dict.fromkeys(STATES, "disk"), "min_bytes": 1}, **settings)
    lines = [f"{event.kind} {event.what}".strip() for event in found.schedule.events if event.phase == "forward"]
    for number in range(3):
        assert lines.index(f"launch load {number}") < lines.index(f"wait load {number}") < lines.index(f"launch gather {number}")
        if number:  # the disk reads for one gather while the one before is on its way
            assert lines.index(f"launch load {number}") < lines.index(f"launch gather {number - 1}")
    assert [event.label for event in found.schedule.events if event.kind == "store"] == ["2.weight", "1.weight", "0.weight"]
    shard = 64 * 64 * 4 // 2
    assert found.disk_bytes == {"shards": 3 * shard, "optimizer states": 6 * shard, "gradients": 3 * shard}
    assert sum(found.states_bytes.values()) == 0
    # each shard is read for both of its gathers, and for the update with its state and gradient; what changes is written
    plain = zerofx.plan(model, (torch.ones(4, 64),), **settings)
    assert found.total_peak_bytes <= plain.total_peak_bytes - sum(plain.states_bytes.values()) + 2 * shard  # of two gathers at once
    loads = [event for event in found.timeline.events if event.task.queue == "disk"]
    assert {event.task.seconds for event in loads} == {shard / 1e9}
    assert found.seconds >= plain.seconds + 3 * (2 * 3 + 1) * shard / 1e9
    with pytest.raises(ConfigError, match="how fast the disks of h100 are"):
        zerofx.plan(model, (torch.ones(4, 64),), world_size=2, offload={"gradients": "disk", "min_bytes": 1})


# ---------------------------------------------------------------- memory


def resident_bytes(pattern: str) -> int:
    """What this process has in memory, by the mappings that a pattern matches."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = re.search(pattern, line) is not None
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def trained_bytes(offload: Any) -> tuple[int, int]:
    """Train a model; return what the process has grown by when a step is done, and the bytes of its shards, gradients and moments."""
    collect()
    before = resident_bytes("")
    model = zerofx.compile(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), stage=2, backend="hooks", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
    collect()
    state = [local(value) for values in optimizer.state.values() for value in values.values() if local(value).ndim]
    if offload is None or "parameters" in offload:
        state += [local(value) for tensor in model.parameters() for value in (tensor, tensor.grad)]
    grown = resident_bytes("") - before
    if offload is not None:
        settings = runtime_of(model).config.offload
        (number,) = [
            link
            for link in Path("/proc/self/fd").iterdir()
            if os.path.islink(link) and str(settings.directory("optimizer")) in os.readlink(link)
        ][-1:]
        assert number.stat().st_mode & 0o777 == 0o600
        assert list(settings.directory("optimizer").iterdir()) == []
    return grown, sum(tensor.numel() * tensor.element_size() for tensor in state)


def collect() -> None:
    """Give back what is free, which the C library else keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure_growth(rank: int, world: int, directory: Path) -> tuple[int, list[tuple[int, int]]]:
    offloads = [{"optimizer": f"disk:{directory}"}, dict.fromkeys(STATES, f"disk:{directory}")]
    trained_bytes(offloads[0])  # what is made once is no part of a difference
    return trained_bytes(None)[0], [trained_bytes(offload) for offload in offloads]


def test_memory_falls_by_what_is_offloaded(ranks: Pool, tmp_path: Path) -> None:
    # one rank: gloo's threads keep buffers for a while, which come and go between two measurements
    ((without, found),) = ranks.run(measure_growth, 1, tmp_path)
    for (grown, nbytes), least in zip(found, (64e6, 128e6), strict=True):
        assert nbytes > least
        assert abs(without - grown - nbytes) < 0.05 * nbytes


def measure_windows(rank: int, world: int, directory: Path) -> tuple[set[int], list[int]]:
    resident, ahead = set[int](), list[int]()
    evict, read_ahead = MappedTensors.evict, MappedTensors.read_ahead

    def evicted(self: MappedTensors, tensors: list[Tensor]) -> None:
        resident.add(round(resident_bytes(str(directory)) / 2**20))
        evict(self, tensors)
        resident.add(round(resident_bytes(str(directory)) / 2**20))

    def read(self: MappedTensors, tensors: list[Tensor]) -> None:
        ahead.append(len(tensors))
        read_ahead(self, tensors)

    with mock.patch.multiple(MappedTensors, evict=evicted, read_ahead=read):
        trained_bytes({"optimizer": f"disk:{directory}", "window_bytes": "7MiB"})  # what belongs to one matrix; biases stay in memory
    return resident, ahead


def test_one_window_is_resident_and_the_next_is_read(ranks: Pool, tmp_path: Path) -> None:
    for resident, ahead in ranks.run(measure_windows, 2, tmp_path):
        # after any eviction, while a shard is moved, and at the end of each window
        assert resident == {0, 2, 6}  # MiB
        assert ahead == [1, 1, 1, 1, 1, 1, 1, 0] + [3, 3, 3, 3, 3, 3, 3, 0] * 2


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time, torch
from zerofx.mapped import MappedFile, MappedTensors
file = MappedFile(pathlib.Path({str(tmp_path)!r}), 2**20)
kept = torch.ones(2**18)
MappedTensors().move(kept, file)
assert os.listdir({str(tmp_path)!r}) == [] and kept.sum() == 2**18
print("there", flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- disks that fail


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_up(rank: int, world: int, directory: Path) -> list[str]:
    """One rank's disk has no space at the first step, and after state was loaded: nothing changes, and with space all goes on."""
    found = []
    for loads in (False, True):
        model = compiled(ODD_SIZES, 2, backend="hooks", offload=tight(directory))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        backward(model, ODD_SIZES, ODD_SIZES.batch(0).part(rank, world), world)
        if loads:
            optimizer.step()
            optimizer.load_state_dict(
                {
                    **optimizer.state_dict(),
                    "state": {
                        number: {key: value.clone() for key, value in values.items()}
                        for number, values in optimizer.state_dict()["state"].items()
                    },
                }
            )
        before = state_of(model, optimizer)
        with files_of_at_most(1000 if rank == 1 else resource.RLIM_INFINITY):
            try:
                optimizer.step()
                found.append("no error")
            except OffloadError as error:
                found += [] if all((error.what, error.why, error.remedy)) and "rank 1" in error.where else [str(error)]
        found += differing(before, state_of(model, optimizer))
        optimizer.step()
        found += in_memory(model, optimizer)
    return found


def test_a_full_disk_is_an_error_on_all_ranks_that_changes_nothing(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(fill_up, 2, tmp_path) == [[]] * 2


def fail(rank: int, world: int, directory: Path, way: str) -> list[str]:
    """The disk of one rank fails in a step; then no rank computes any more. Returns what each says."""
    model = compiled(ODD_SIZES, 2, backend="hooks", offload=tight(directory))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batch = ODD_SIZES.batch(0).part(rank, world)
    said = []
    for step in range(3):
        try:
            backward(model, ODD_SIZES, batch, world)
            if way == "read" and step == 1 and rank == 1:
                for file in disk_of(model).tensors.files():
                    os.ftruncate(file._number, 0)
            broken = mock.patch("os.fdatasync", side_effect=OSError(5, "Input/output error"))
            with broken if way == "write" and step == 1 and rank == 1 else mock.MagicMock():
                optimizer.step()
                wait([written] if (written := disk_of(model)._written) else [])
        except ZerofxError as error:
            said.append(f"{step} {type(error).__name__}: {error.what}")
    return said


@pytest.mark.parametrize(("way", "error"), [("read", "[Errno 14] Bad address"), ("write", "[Errno 5] Input/output error")])
def test_a_disk_that_fails_stops_all_ranks(ranks: Pool, tmp_path: Path, way: str, error: str) -> None:
    says = f"OffloadError: the disk fails under offloaded state: {error}"
    own = [f"1 {says}"] if way == "read" else []
    assert ranks.run(fail, 2, tmp_path, way) == [[f"2 RankMismatchError: rank 1 raised {says}"], [*own, f"2 {says}"]]


def fill_up_in_init(rank: int, world: int, directory: Path, way: str) -> list[str]:
    """One rank has no directory, or no space for the first or for the last parameter."""
    nowhere = way == "directory" and rank == 1
    said = []
    try:
        with (
            files_of_at_most(resource.RLIM_INFINITY),
            zerofx.init(offload={"parameters": f"disk:{directory / 'missing' if nowhere else directory}", "min_bytes": 1}),
        ):
            if way == "middle" and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            first = nn.Linear(8, 8, bias=False)
            if way == "middle":
                nn.Linear(8, 8, bias=False)
            if way == "end" and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        del first
    except ZerofxError as error:
        said = [type(error).__name__, error.what]
    return said


@pytest.mark.parametrize(
    ("way", "error", "says"),
    [
        ("directory", "ConfigError", "there can be no file in"),
        ("middle", "OffloadError", "cannot be written: File too large"),
        ("end", "OffloadError", "the shard of weight cannot be written: File too large"),
    ],
)
def test_what_one_rank_lacks_in_init_is_an_error_on_all(ranks: Pool, tmp_path: Path, way: str, error: str, says: str) -> None:
    other, own = ranks.run(fill_up_in_init, 2, tmp_path, way)
    assert other[0] == "RankMismatchError"
    assert other[1].startswith("rank 1 cannot build: ")
    assert own[0] == error
    assert says in own[1]


def move_nowhere(rank: int, world: int, directory: Path) -> list[str]:
    """Model.to gives each parameter another local tensor: what was changed before must still show."""
    models = [compiled(GPT, 3, backend="hooks", offload=offload) for offload in (None, tight(directory))]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            backward(model, GPT, GPT.batch(step).part(rank, world), world)
            optimizer.step()
            optimizer.zero_grad()
            if model is models[1]:
                model.to("cpu")
    return differing(*map(state_of, models, optimizers))


def test_a_model_that_is_moved_to_where_it_is_trains_on(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(move_nowhere, 2, tmp_path) == [[]] * 2


class Boundless(nn.Module):
    """In float16, the gradient of the last of eight rows overflows alone; the first parameter is on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset


def go_on_with_gradients(rank: int, world: int, directory: Path) -> list[str]:
    """What autograd does with gradients beside those that are there: each way as without offload."""
    batches, found = [GPT.batch(step).part(rank, world) for step in range(2)], []

    def halve_in_place(gradient: Tensor) -> Tensor:
        return gradient.mul_(0.5)

    def run(way: str, offload: Any) -> list[Tensor | None]:
        model = compiled(GPT, 3, backend="hooks", offload=offload)
        tensors = list(model.parameters())
        for tensor in tensors:
            if way == "hook":
                tensor.register_hook(halve_in_place)
        backward(model, GPT, batches[0], world)
        loss = GPT.loss(model(*batches[1].inputs), batches[1].target, world)
        if way == "grad":
            return [local(grad).clone() for grad in torch.autograd.grad(loss, tensors)] + [local(tensor.grad) for tensor in tensors]
        if way == "changed":
            torch.optim.SGD(tensors, 0.1).step()
            with pytest.raises(ShardingError):
                loss.backward()
        else:
            loss.backward(inputs=tensors[:2] if way == "inputs" else None)
        return [local(tensor.grad).clone() for tensor in tensors]

    for way in ("grad", "inputs", "changed", "hook", "plain"):
        pairs = zip(run(way, None), run(way, tight(directory)), strict=True)
        found += [way] if any(not one.equal(other) for one, other in pairs) else []
    model = zerofx.compile(Boundless(), stage=3, backend="hooks", offload=tight(directory), precision="fp16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for last in (1.0, 60000.0):
        scaler.scale(model(torch.ones(4, 8) * torch.tensor([*[1.0] * 7, last]))[:, 7].sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return found + ([] if scaler.get_scale() == 4.0 else [f"an overflow in what is added up, at a scale of {scaler.get_scale()}"])


def test_gradients_are_added_up_by_autograd(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(go_on_with_gradients, 2, tmp_path) == [[]] * 2


def test_what_is_conjugated_later_is_written_as_what_it_is(tmp_path: Path) -> None:
    tensors, value = MappedTensors(), torch.complex(torch.ones(4), torch.arange(4.0))
    for source in (value.conj(), value.conj().imag):
        assert tensors.put(source, Region.of(MappedFile(tmp_path, source.nbytes), source.nbytes)).equal(source)


def add_up_on_a_full_disk(rank: int, world: int, directory: Path) -> list[str]:
    """There is no space for gradients beside those that are there: those stay, and with space all goes on."""
    found, batch = [], GPT.batch(0).part(rank, world)
    model = compiled(GPT, 3, backend="hooks", offload=tight(directory))
    backward(model, GPT, batch, world)
    before = [local(tensor.grad).clone() for tensor in model.parameters()]
    with files_of_at_most(1000 if rank == 1 else resource.RLIM_INFINITY):
        try:
            backward(model, GPT, batch, world)
            found.append("no error")
        except ZerofxError as error:
            found += [] if type(error) is (RankMismatchError, OffloadError)[rank] else [str(error)]
    for factor in (1, 2):
        pairs = zip(before, model.parameters(), strict=True)
        found += [f"not {factor} times" for one, tensor in pairs if not local(tensor.grad).equal(factor * one)]
        if factor == 1:
            backward(model, GPT, batch, world)
    return found


def test_gradients_that_are_there_stay_on_a_full_disk(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(add_up_on_a_full_disk, 2, tmp_path) == [[]] * 2


def fail_between_optimizers(rank: int, world: int, directory: Path) -> str:
    """The disk of one rank fails in a step, and the next optimizer's first step sets space aside."""
    model = compiled(GPT, 3, backend="hooks", offload=tight(directory))
    first, *others = model.parameters()
    optimizers = [torch.optim.AdamW(tensors) for tensors in ([first], others)]
    backward(model, GPT, GPT.batch(0).part(rank, world), world)
    with mock.patch("os.fdatasync", side_effect=OSError(5, "Input/output error")) if rank == 1 else mock.MagicMock():
        optimizers[0].step()
        wait([written] if (written := disk_of(model)._written) else [])
    with pytest.raises(OffloadError) as caught:
        optimizers[1].step()
    return caught.value.where.partition(",")[0]


def test_a_disk_that_failed_is_told_where_the_next_optimizer_steps(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(fail_between_optimizers, 2, tmp_path, timeout_s=30) == ["rank 1"] * 2
