"""Files of a sharded model: any world size and stage to any other, atomic, checked before anything changes."""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.models import Case, case_named
from tests.ranks import Failure, Pool
from tests.reference import backward, momentum, named_differences, whole, whole_parameters
from tests.stages import STAGES
from tests.test_bad_input import assert_four_parts, failure_of
from zerofx import storage

Model = tuple[nn.Module, torch.optim.Optimizer]
# Worlds, stages and backends that save, and that load: at world 4, a rank holds nothing of the parameters with six rows.
SAVED = ((1, 0, "hooks"), (2, 3, "aot_eager"), (3, 1, "hooks"), (4, 2, "hooks"))


def built(case: Case, stage: int, seed: int = 0, backend: str = "hooks") -> Model:
    model = zerofx.compile(case.model(seed), stage=stage, backend=backend)
    return model, momentum(model, case.learning_rate)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, numbers: range, rank: int = 0, world: int = 1) -> None:
    for number in numbers:
        backward(model, case, case.batch(number).part(rank, world), world)
        optimizer.step()
        optimizer.zero_grad()


def save_one(rank: int, world: int, directory: str, name: str, stage: int, backend: str) -> None:
    case = case_named(name)
    model, optimizer = built(case, stage, backend=backend)
    steps(model, optimizer, case, range(2), rank, world)
    zerofx.save(f"{directory}/{name}-{world}", model, optimizer, step=2, names=("a", {"b": [1, None]}))


def load_all(rank: int, world: int, directory: str, name: str) -> list[dict[str, Tensor]]:
    case, found = case_named(name), []
    for saved_world, _, _ in SAVED:
        # over all worlds, every file meets every stage
        model, optimizer = built(case, (saved_world + world) % 4, seed=1)
        extras = zerofx.load(f"{directory}/{name}-{saved_world}", model, optimizer)
        assert extras == {"step": 2, "names": ("a", {"b": [1, None]})}
        steps(model, optimizer, case, range(2, 3), rank, world)
        found.append(whole_parameters(model))
    return found


@pytest.mark.parametrize("name", ["tied_mlp", "tied_embedding"])
def test_any_world_size_and_stage_to_any_other(ranks: Pool, tmp_path: Path, name: str) -> None:
    case = case_named(name)
    model = case.model()
    optimizer = momentum(model, case.learning_rate)
    steps(model, optimizer, case, range(3))
    for world, stage, backend in SAVED:
        ranks.run(save_one, world, str(tmp_path), name, stage, backend)
    for world in (1, 2, 3, 4):
        for rank, found in enumerate(ranks.run(load_all, world, str(tmp_path), name)):
            for index, parameters in enumerate(found):
                assert named_differences(f"world {world}, rank {rank}, load {index}:", parameters, whole_parameters(model)) == []


class Mixed(nn.Module):
    """A frozen layer, a scalar, a tiny parameter, buffers and dropout."""

    def __init__(self, *scale_shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(scale_shape, 1.5))
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(7, 1)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x) * self.scale)))


def mixed(stage: int, seed: int = 0, *scale_shape: int) -> Model:
    torch.manual_seed(seed)
    model = zerofx.compile(Mixed(*scale_shape), stage=stage, backend="hooks")
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed, others = [model.first.weight, model.last.weight], [model.scale, model.first.bias, *model.norm.parameters(), model.last.bias]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.2}, {"params": others}], 0.05)


def mixed_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, whole, by name."""
    named, optimizer_state = get_state_dict(model, optimizer)
    state = {**named, **{f"{name} {key}": value for name, values in optimizer_state["state"].items() for key, value in values.items()}}
    groups = {f"group {index}": group for index, group in enumerate(optimizer_state["param_groups"])}
    return {**{name: whole(value) for name, value in state.items()}, **groups}


def unequal(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = sorted({*actual, *expected})
    return [name for name in names if name not in actual or name not in expected or not same(actual[name], expected[name])]


def same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


def exchange_with_other_parallelisms(rank: int, world: int, directory: str) -> list[str]:
    """FSDP2's and DDP's checkpoints into zerofx, and zerofx's into theirs: equal states, bit by bit."""
    found = []
    for kind in ("fsdp2", "ddp"):

        def other(seed: int, kind: str = kind) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
            torch.manual_seed(seed)
            plain = Mixed(1)  # FSDP2 takes no scalars
            wrapped = fully_shard(plain) if kind == "fsdp2" else DistributedDataParallel(plain)
            return wrapped, adamw(plain), plain

        model, optimizer, _ = other(0)
        for step in range(3):
            mixed_step(model, optimizer, step)  # one batch for all, so that the buffers are equal: FSDP2 keeps those of some rank
        named, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": named, "optim": optimizer_state}, checkpoint_id=f"{directory}/{kind}")
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"model": named, "optim": flat}, checkpoint_id=f"{directory}/{kind}-flat")
        expected = whole_state(model, optimizer)
        for stage in STAGES:
            ours, our_optimizer = mixed(stage, 1, 1)
            assert zerofx.load(f"{directory}/{kind}{'-flat' if stage % 2 else ''}", ours, our_optimizer) == {}
            found += [f"{kind} at stage {stage}: {name}" for name in unequal(whole_state(ours, our_optimizer), expected)]
        zerofx.save(f"{directory}/zerofx-{kind}", ours, our_optimizer)
        model, optimizer, _ = other(2)
        named, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": named, "optim": optimizer_state}, checkpoint_id=f"{directory}/zerofx-{kind}")
        set_state_dict(model, optimizer, model_state_dict=named, optim_state_dict=optimizer_state)
        found += [f"zerofx to {kind}: {name}" for name in unequal(whole_state(model, optimizer), expected)]
    return found


def test_to_and_from_fsdp2_and_ddp(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(exchange_with_other_parallelisms, 2, str(tmp_path)) == [[], []]


def resume(rank: int, world: int, directory: str) -> list[str]:
    """Continue after a save, and again after loading it into new objects: the same bits, with each rank's dropout and buffers."""
    found = []
    for stage, backend in ((1, "hooks"), (3, "aot_eager")):
        torch.manual_seed(rank)
        model = zerofx.compile(Mixed(), stage=stage, backend=backend)
        first, last = [model.scale, *model.first.parameters()], model.last.parameters()
        optimizers = [torch.optim.AdamW(first, 0.1), torch.optim.SGD(last, 0.1, momentum=0.9)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def train(model: nn.Module, optimizers: list[Any], scheduler: Any, scaler: Any, count: int) -> dict[str, Any]:
            for step in range(count):
                loss = model(torch.randn(6, 5) * (rank + step + 1)).square().mean()
                scaler.scale(loss).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                model.zero_grad()
            state = {**whole_state(model, optimizers), "scaler": scaler.get_scale(), "random": torch.rand(3)}
            return {**state, **{f"own {name}": buffer.clone() for name, buffer in model.named_buffers()}}

        train(model, optimizers, scheduler, scaler, 3)
        torch.rand(rank)  # the ranks have drawn different amounts
        zerofx.save(f"{directory}/{stage}", model, optimizers, scheduler=scheduler, scaler=scaler)
        expected = train(model, optimizers, scheduler, scaler, 2)
        torch.manual_seed(7)
        again = zerofx.compile(Mixed(), stage=stage, backend=backend)
        others = [torch.optim.AdamW([again.scale, *again.first.parameters()], 0.3), torch.optim.SGD(again.last.parameters(), 0.3)]
        other_scheduler, other_scaler = torch.optim.lr_scheduler.StepLR(others[0], 5), torch.amp.GradScaler("cpu")
        extras = zerofx.load(f"{directory}/{stage}", again, others)
        other_scheduler.load_state_dict(extras["scheduler"])
        other_scaler.load_state_dict(extras["scaler"])
        found += [f"stage {stage}: {name}" for name in unequal(train(again, others, other_scheduler, other_scaler, 2), expected)]
    return found


def test_resumed_training_is_bitwise_the_same(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(resume, 2, str(tmp_path)) == [[], []]


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values_of(path: str, model: nn.Module) -> tuple[int, set[float]]:
    step = zerofx.load(path, model)["step"]
    return step, {value for parameter in whole_parameters(model).values() for value in parameter.flatten().tolist()}


def die_at_each_point(rank: int, world: int, path: str) -> tuple[int, list[Any]]:
    """Save step 1; then save step 2 in processes that are killed before their nth change of files, until one is not killed."""
    model = zerofx.compile(Mixed(), stage=3, backend="hooks")
    fill(model, 1.0)
    zerofx.save(path, model, step=1)
    wrong = []
    for point in range(1, 100):
        child = os.fork()
        if child == 0:
            left = [point]

            def count(event: str, arguments: tuple[Any, ...], left: list[int] = left) -> None:
                if event in ("os.rename", "os.remove", "os.mkdir") or (event == "open" and arguments[1] and "w" in str(arguments[1])):
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            fill(model, 2.0)
            zerofx.save(path, model, step=2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        step, values = values_of(path, model)
        if values != {float(step)}:
            wrong.append((point, step, values))
        if os.WIFEXITED(status):
            return point, [*wrong, *([] if step == 2 else ["the last save is not there"])]
        if step == 2:
            shutil.rmtree(path)
            fill(model, 1.0)
            zerofx.save(path, model, step=1)
    return 0, wrong


def test_a_crash_at_any_point_leaves_the_last_good_one(ranks: Pool, tmp_path: Path) -> None:
    ((points, wrong),) = ranks.run(die_at_each_point, 1, str(tmp_path / "model"), group=False)
    assert wrong == []
    # A data file, the metadata and its renaming, and the removal of the old file are points to die at.
    assert points > 4


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_asynchronously(rank: int, world: int, directory: str) -> tuple[Any, ...]:
    model, _ = mixed(3)
    fill(model, 1.0)
    counter = {"value": 1}
    future = zerofx.save(f"{directory}/model", model, asynchronous=True, step=1, counter=counter)
    fill(model, 9.0)
    counter["value"] = 9
    future.result()
    first = values_of(f"{directory}/model", model)
    fill(model, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(storage.Writer, "write_data", full_disk)
        for _ in range(2):
            future = zerofx.save(f"{directory}/model", model, asynchronous=True, step=2)
            failure = failure_of(future.result)
    after = values_of(f"{directory}/model", model)
    # two of the checkpoint, its metadata, and one that the last failed save left: those of earlier ones made room for it
    assert len(list(Path(directory, "model").iterdir())) == 4
    futures = [zerofx.save(f"{directory}/model", model, asynchronous=True, step=step) for step in (3, 4)]
    for future in futures:
        future.result()
    return first, failure, after, zerofx.load(f"{directory}/model", model), len(list(Path(directory, "model").iterdir()))


def test_asynchronous(ranks: Pool, tmp_path: Path) -> None:
    for first, failure, after, last, files in ranks.run(save_asynchronously, 2, str(tmp_path)):
        assert first == after == (1, {1.0})
        assert_four_parts(failure, "CheckpointError", "No space left", "rank 1")
        assert last == {"step": 4}
        assert files == 3  # one of each rank, and the metadata: nothing of earlier saves


@dataclass
class Evil:
    """Makes a directory when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def damage(path: Path, way: str) -> str:
    """Damage a checkpoint in one way; return what the error must name."""
    data = sorted(path.glob("*.distcp"))[0]
    metadata = path / ".metadata"
    content, target = data.read_bytes(), data
    match way:
        case "flipped bit":
            middle = content.index(struct.pack("<3f", 1.0, 1.0, 1.0))
            data.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "cut off":
            data.write_bytes(content[: len(content) // 2])
        case "removed":
            data.unlink()
        case "metadata cut off" | "metadata flipped" | "later version" | "code":
            target, content = metadata, metadata.read_bytes()
            middle = content.index(b"first.weight")
            pickled = content[: -storage._TRAILER.size]
            metadata.write_bytes(
                {
                    "metadata cut off": content[: len(content) // 2],
                    "metadata flipped": content[:middle] + b"x" + content[middle + 1 :],
                    "later version": pickled + storage._TRAILER.pack(b"zerofx", storage.FORMAT + 1, zlib.crc32(pickled)),
                    "code": pickle.dumps(Evil(f"{path.parent}/executed")),
                }[way]
            )
        case "code in an entry":
            # where DCP itself would execute it: an option of a parameter group
            found = pickle.loads(metadata.read_bytes())
            entry = next(entry for index, entry in found.storage_data.items() if index.fqn == "optim.param_groups.0.lr")
            target = path / entry.relative_path
            content, written = target.read_bytes(), io.BytesIO()
            torch.save(Evil(f"{path.parent}/executed"), written)
            entry.offset, entry.length, entry.crc32 = len(content), len(written.getvalue()), zlib.crc32(written.getvalue())
            target.write_bytes(content + written.getvalue())
            metadata.write_bytes(pickle.dumps(found))
        case "no metadata":
            metadata.unlink()
            return str(metadata)
    return str(target)


DAMAGES = (
    "flipped bit",
    "cut off",
    "removed",
    "metadata cut off",
    "metadata flipped",
    "later version",
    "code",
    "code in an entry",
    "no metadata",
)


def load_damaged(rank: int, world: int, directory: str) -> list[tuple[str, Failure, list[str]]]:
    model, optimizer = mixed(3)
    fill(model, 1.0)
    mixed_step(model, optimizer, 0)
    fill(model, 1.0)
    zerofx.save(f"{directory}/good", model, optimizer)
    fill(model, 5.0)
    before, found = whole_state(model, optimizer), []
    for number, way in enumerate(DAMAGES):
        path = Path(directory, str(number))
        names: list[Any] = [None]
        if rank == 0:
            shutil.copytree(f"{directory}/good", path)
            names = [damage(path, way)]
        dist.broadcast_object_list(names)
        failure = failure_of(lambda path=path: zerofx.load(path, model, optimizer))
        found.append((names[0], failure, unequal(whole_state(model, optimizer), before)))
    return found


def test_damaged_files_are_named_and_change_nothing(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks.run(load_damaged, 2, str(tmp_path)):
        for way, (name, failure, changed) in zip(DAMAGES, found, strict=True):
            assert changed == [], way
            assert_four_parts(failure, "CheckpointError", name)
    assert not (tmp_path / "executed").exists()


class Other(Mixed):
    """Another width, one parameter more and one less."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 2, bias=False)
        self.more = nn.Linear(2, 2, bias=False)


def refuse_what_does_not_fit(rank: int, world: int, directory: str) -> list[Failure]:
    path = f"{directory}/model"
    model, optimizer = mixed(3)
    mixed_step(model, optimizer, 0)
    zerofx.save(path, model, optimizer)
    other = zerofx.compile(Other(), stage=3, backend="hooks")
    one_group = torch.optim.AdamW(model.parameters(), 0.1)
    by_sgd = torch.optim.SGD([dict(group, lr=0.1) for group in [{"params": group["params"]} for group in optimizer.param_groups]])
    half = torch.optim.AdamW(optimizer.param_groups[0]["params"], 0.1)
    file = Path(directory, "file")
    file.touch()
    shard = {"shards": next(model.parameters())}
    actions: list[Callable[[], Any]] = [
        lambda: zerofx.load(path, other),
        lambda: zerofx.load(path, model, torch.optim.SGD(other.parameters(), 0.1)),
        lambda: zerofx.load(path, model, [optimizer, one_group]),
        lambda: zerofx.load(path, model, one_group),
        lambda: zerofx.load(path, model, by_sgd),
        lambda: zerofx.load(path, model, half),
        lambda: zerofx.load(file, model),
        lambda: zerofx.load(f"{directory}/nothing", model),
        lambda: zerofx.save(file, model),
        lambda: zerofx.save(path, model, "adam"),
        lambda: zerofx.save(path, model, function=print),
        lambda: zerofx.save(path, model, ema=shard),
        lambda: zerofx.save(path if rank else file, model),
        lambda: zerofx.load(path if rank else file, model),
        lambda: zerofx.full_state_dict(model, dtype=torch.int8),
    ]
    failures = [failure_of(action) for action in actions]
    plain = nn.Linear(2, 2)
    failures += [failure_of(lambda call=call: call(plain)) for call in (zerofx.full_state_dict, lambda model: zerofx.save(path, model))]
    zerofx.load(path, model, optimizer)  # the saves that were refused left what was there
    return failures


def test_bad_input(ranks: Pool, tmp_path: Path) -> None:
    expected = [
        ("CheckpointError", "missing: more.weight", "unexpected: last.bias", "last.weight (file (1, 7), model (2, 7))"),
        ("CheckpointError", "another model"),
        ("CheckpointError", "as another optimizer does"),
        ("CheckpointError", "no such parameter group: AdamW of scale, first.weight"),
        ("CheckpointError", "another kind of optimizer", "momentum", "betas"),
        ("CheckpointError", "in no optimizer given: scale, first.bias"),
        ("CheckpointError", "is a file"),
        ("CheckpointError", "not there"),
        ("CheckpointError", "exists", "file"),
        ("CheckpointError", "str is no optimizer"),
        ("CheckpointError", "function cannot be saved"),
        ("CheckpointError", "ema cannot be saved", "shards"),
        ("CheckpointError", "file"),
        ("CheckpointError", "is a file"),
        ("CheckpointError", "int8"),
        ("ShardingError", "zerofx.compile"),
        ("ShardingError", "zerofx.compile"),
    ]
    for failures in ranks.run(refuse_what_does_not_fit, 2, str(tmp_path)):
        for failure, (kind, *words) in zip(failures, expected, strict=True):
            assert_four_parts(failure, kind, *words)


def plain_state(rank: int, world: int, directory: str) -> Failure:
    """An optimizer that keeps plain tensors of each rank: one of them would be kept for all."""
    model, optimizer = mixed(3)
    optimizer.state[model.first.weight]["quantised"] = torch.ones(4) * rank
    return failure_of(lambda: zerofx.save(f"{directory}/model", model, optimizer))


def test_state_that_would_be_lost_is_refused(ranks: Pool, tmp_path: Path) -> None:
    for failure in ranks.run(plain_state, 2, str(tmp_path)):
        assert_four_parts(failure, "CheckpointError", "quantised", "first.weight")


def load_weights(rank: int, world: int, directory: str) -> tuple[list[str], list[Failure], tuple[list[str], list[str]]]:
    found = []
    for path in (directory, f"{directory}/model-1-of-1.safetensors"):
        for stage in STAGES:
            case = case_named("tied_embedding")
            model = zerofx.compile(case.model(1), stage=stage, backend="hooks")
            assert zerofx.load_safetensors(path, model) == ([], [])
            found += named_differences(f"stage {stage}", whole_parameters(model), dict(case.model().named_parameters()))
    broken = [f"{directory}/cut", f"{directory}/absent", f"{directory}/other", f"{directory}/index"]
    failures = [failure_of(lambda path=path: zerofx.load_safetensors(path, model)) for path in broken]
    return found, failures, zerofx.load_safetensors(f"{directory}/part", model, strict=False)


def test_safetensors(ranks: Pool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = dict(case_named("tied_embedding").model().state_dict())
    del weights["head.weight"]  # as Hugging Face saves what is tied
    save_file(weights, tmp_path / "model-1-of-1.safetensors")
    first = {name: weights[name] for name in ("scale", "embedding.weight")}
    save_file(first, tmp_path / "a.safetensors")
    save_file({name: weights[name] for name in weights if name not in first}, tmp_path / "b.safetensors")
    files = {name: f"{'a' if name in first else 'b'}.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("cut", "other", "index", "part"):
        (tmp_path / name).mkdir()
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut" / "a.safetensors").write_bytes(content[:-8])
    save_file({**weights, "scale": torch.ones(3)}, tmp_path / "other" / "a.safetensors")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("[]")
    save_file({**first, "more": torch.ones(1)}, tmp_path / "part" / "a.safetensors")
    for found, failures, (missing, unexpected) in ranks.run(load_weights, 3, str(tmp_path)):
        assert found == []
        words = ["cut/a.safetensors", "absent", "scale (file (3,), model (4,))", "model.safetensors.index.json"]
        for failure, word in zip(failures, words, strict=True):
            assert_four_parts(failure, "CheckpointError", word)
        assert (missing, unexpected) == (["hidden.weight", "hidden.bias"], ["more"])


def load_without_memory(rank: int, world: int, directory: str) -> list[str]:
    model, optimizer = mixed(3)
    mixed_step(model, optimizer, 0)
    zerofx.save(f"{directory}/model", model)
    with torch.device("meta"):
        empty = Mixed()
    again = zerofx.compile(empty, stage=3, backend="hooks")
    zerofx.load(f"{directory}/model", again)
    return unequal(zerofx.full_state_dict(again), zerofx.full_state_dict(model))


def test_a_model_on_the_meta_device_gets_its_memory_when_it_loads(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(load_without_memory, 2, str(tmp_path)) == [[], []]
