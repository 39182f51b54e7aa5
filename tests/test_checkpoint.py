"""A checkpoint is whole or absent, holds everything that the next step depends on, and loads exactly."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from scripted import random_ids, random_router, shake, spoken

from minirouter import checkpoint
from minirouter.checkpoint import TornCheckpoint, check, load, newest, prune, save
from minirouter.packing import pack

STATE = {
    "stream": {"epoch": 1, "position": 3},
    "scale": {"window": 1000, "roots": [0.1, 1 / 3]},
    "best_em": 0.5,
}


def learner(seed: int = 0, critic: bool = True):
    """A router and its optimisers, as training makes them; the base is the same for every seed."""
    router = random_router(critic=critic)
    shake(router, seed)
    roles = ("critic", "policy") if critic else ("policy",)
    return router, {role: torch.optim.AdamW(router.parameters(role), lr=1e-2) for role in roles}


def step(router, optimisers, seed: int = 0) -> None:
    """One step of each role on something."""
    rng = random.Random(seed)
    batch = pack([spoken(rng, random_ids(rng, 5), (3,)) for _ in range(2)])
    for role, optimiser in optimisers.items():
        (router.value(batch) if role == "critic" else router.logp(batch)[0]).sum().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def everything(router, optimisers) -> dict[str, torch.Tensor]:
    """All that is trained, and the moments of its optimisers."""
    found = {name: p for name, p in router.model.named_parameters() if "lora_" in name}
    found |= dict(router.value_head.named_parameters(prefix="head"))
    for role, optimiser in optimisers.items():
        for i, moments in optimiser.state_dict()["state"].items():
            found |= {f"{role}.{i}.{name}": t for name, t in moments.items()}
    return {name: t.detach().clone() for name, t in found.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2, and what they hold."""
    folder = tmp_path_factory.mktemp("checkpoints")
    router, optimisers = learner()
    held = {}
    for n in (1, 2):
        step(router, optimisers, n)
        save(folder, n, router, optimisers, STATE)
        held[n] = everything(router, optimisers)
    return folder, held


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of these checkpoints, to damage."""
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_everything_comes_back_bit_for_bit_and_goes_on_alike(saved):
    """Catches a value head or moments that start anew, adapters that load frozen, and parameters that the
    optimiser no longer holds."""
    path, held = saved
    router, optimisers = learner(seed=1)
    assert not same(everything(router, optimisers), held[2])
    state = load(path / "step-000002", router, optimisers)
    assert state == STATE | {"step": 2}
    assert same(everything(router, optimisers), held[2])
    assert len(held[2]) > 100 and any("exp_avg_sq" in name for name in held[2])

    first, of_first = learner()
    for n in (1, 2, 3):
        step(first, of_first, n)
    step(router, optimisers, 3)
    assert same(everything(router, optimisers), everything(first, of_first))
    assert not same(everything(router, optimisers), held[2])


def test_loading_wraps_no_adapter_again(saved):
    """Catches an adapter that is loaded as another one beside, or on top of, the one that is trained."""
    router, optimisers = learner(seed=1)
    before = [name for name, _ in router.model.named_parameters()]
    load(saved[0] / "step-000002", router, optimisers)
    load(saved[0] / "step-000002", router, optimisers)
    assert [name for name, _ in router.model.named_parameters()] == before
    assert sorted(router.model.peft_config) == ["critic", "policy"]


def test_a_warm_reference_is_kept_and_taken_up(tmp_path):
    """Catches a KL that after resuming is measured from the bare base, or from the trained policy."""
    router, optimisers = learner(critic=False)
    router.freeze_reference()
    step(router, optimisers)
    save(tmp_path, 1, router, optimisers, {})
    fresh, of_fresh = learner(seed=1, critic=False)
    load(tmp_path / "step-000001", fresh, of_fresh)
    assert fresh.warm and same(everything(fresh, of_fresh), everything(router, optimisers))
    rng = random.Random(0)
    batch = pack([spoken(rng, random_ids(rng, 5), (3,))])
    with router.reference(), fresh.reference():
        assert torch.equal(router.logp(batch)[0], fresh.logp(batch)[0])
    assert not torch.equal(router.logp(batch)[0], _reference(router, batch))


def _reference(router, batch) -> torch.Tensor:
    with router.reference():
        return router.logp(batch)[0]


def test_no_file_is_a_pickle(saved):
    """Catches torch.save by way of a library: loading a checkpoint must never run code."""
    files = [path for path in saved[0].rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md"} and len(files) > 8
    for path in files:
        head = path.read_bytes()[:9]
        assert not head.startswith((b"\x80", b"PK"))
        assert path.suffix != ".safetensors" or head[8:] == b"{"


def test_a_checkpoint_with_a_pickle_in_place_of_weights_is_refused(folder):
    """Catches PEFT's second choice, a pickle, in a run folder that somebody else made."""
    path = folder / "step-000002"
    weights = path / "critic" / "adapter_model.safetensors"
    weights.rename(weights.with_name("adapter_model.bin"))
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    manifest = {str(f.relative_to(path)): [f.stat().st_size, checkpoint._sha256(f)] for f in files}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TornCheckpoint, match=r"critic/adapter_model\.safetensors is missing"):
        load(path, *learner(seed=1))


DAMAGE = {
    "manifest gone": ("manifest.json", None),
    "manifest cut": ("manifest.json", lambda data: data[: len(data) // 2]),
    "manifest empty": ("manifest.json", lambda data: b"{}"),
    "manifest a list": ("manifest.json", lambda data: b"[1]"),
    "manifest of words": ("manifest.json", lambda data: b'{"state.json": "x"}'),
    "adapter gone": ("policy/adapter_model.safetensors", None),
    "critic gone": ("critic/adapter_model.safetensors", None),
    "tensors cut": ("tensors.safetensors", lambda data: data[:-1]),
    "tensors empty": ("tensors.safetensors", lambda data: b""),
    "one bit": (
        "critic/adapter_model.safetensors",
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    ),
    "state changed": ("state.json", lambda data: data.replace(b"0.5", b"0.6")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(folder, kind):
    """Catches half a checkpoint taken for a whole one, and one that hides all others."""
    name, change = DAMAGE[kind]
    file = folder / "step-000002" / name
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    path, torn = newest(folder)
    assert path == folder / "step-000001"
    assert len(torn) == 1 and "step-000002 is not whole" in torn[0] and "\n" not in torn[0]
    assert ("manifest.json" if "manifest" in kind and kind != "manifest empty" else "") in torn[0]
    with pytest.raises(TornCheckpoint):
        load(folder / "step-000002", *learner(seed=1))


def test_every_file_is_looked_at(folder):
    """Catches a file that the manifest leaves out."""
    for file in sorted((folder / "step-000002").rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            file.write_bytes(data + b" ")
            if file.name != "manifest.json":
                with pytest.raises(TornCheckpoint, match=file.name):
                    check(folder / "step-000002")
            file.write_bytes(data)
    check(folder / "step-000002")


def test_without_a_whole_checkpoint_there_is_none(folder):
    """Catches a folder of ruins taken for a fresh one, and an exception for an empty one."""
    for path in folder.glob("step-*"):
        (path / "state.json").unlink()
    path, torn = newest(folder)
    assert path is None and [int(line.split("step-")[1][:6]) for line in torn] == [2, 1]
    assert newest(folder / "nowhere") == (None, [])


class Crash(BaseException):
    """The machine goes down."""


@pytest.mark.parametrize("where", ["save_file", "_sha256", "sync", "os.replace"])
def test_a_crash_while_saving_leaves_the_checkpoints_before(folder, monkeypatch, where):
    """Catches a checkpoint that appears under its name before it is complete."""

    def crash(*args, **options):
        raise Crash

    router, optimisers = learner()
    with monkeypatch.context() as patch:
        patch.setattr(f"minirouter.checkpoint.{where}", crash)
        with pytest.raises(Crash):
            save(folder, 3, router, optimisers, STATE)
    assert newest(folder) == (folder / "step-000002", [])
    save(folder, 3, router, optimisers, STATE)
    assert newest(folder) == (folder / "step-000003", [])
    prune(folder, 3, 5, None)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.parametrize("where", ["save_file", "os.replace", "Path.write_text", "Path.mkdir"])
def test_a_full_disk_is_one_line_with_the_folder_and_the_checkpoints_before_stay(folder, monkeypatch, where):
    """Catches a traceback without a file name, and room made by deleting what is still needed."""

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(f"minirouter.checkpoint.{where}", full)
    with pytest.raises(
        OSError, match=r"^\[Errno 28\] checkpoint not written \(No space left on device\)"
    ) as caught:
        save(folder, 3, *learner(), STATE)
    assert str(folder / "step-000003") in str(caught.value) and "\n" not in str(caught.value)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert newest(folder)[0] == folder / "step-000002"


def test_an_error_of_the_tensor_writer_is_told_alike(folder, monkeypatch):
    """Catches the writer's own kind of exception, which is no OSError."""

    def full(*args, **options):
        raise checkpoint.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr("minirouter.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"checkpoint not written .*No space left on device.*step-000003"):
        save(folder, 3, *learner(), STATE)


@pytest.mark.parametrize(
    ("steps", "keep", "best", "left"),
    [
        ((1, 2, 3, 4), 2, None, (3, 4)),
        ((1, 2, 3, 4), 2, 1, (1, 3, 4)),
        ((1, 2, 3, 4), 2, 4, (3, 4)),
        ((1, 2, 3, 4), 9, None, (1, 2, 3, 4)),
        ((2, 4, 6, 8), 2, None, (2, 4)),  # 4 was just saved: 6 and 8 belong to what was passed over
        ((8, 10, 12), 1, None, (10,)),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, steps, keep, best, left):
    """Catches a best checkpoint deleted, and torn ones that stay while whole ones go."""
    for n in steps:
        (tmp_path / f"step-{n:06d}").mkdir()
    (tmp_path / ".step-000003.partial").mkdir()
    just_saved = {2: 4, 8: 10}.get(steps[0], 4)
    prune(tmp_path, just_saved, keep, best)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:06d}" for n in left]


def test_the_state_survives_json_exactly(saved):
    """Catches numbers that are rounded on their way through the file."""
    state = json.loads((Path(saved[0]) / "step-000001" / "state.json").read_text())
    assert state["scale"]["roots"] == [0.1, 1 / 3]
