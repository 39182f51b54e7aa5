"""Checkpoints: everything that the next step depends on, written beside and renamed, so that one is whole or
absent.

    step-000040/
      policy/ critic/ [reference/]   PEFT adapters, safetensors
      tensors.safetensors            value head and the moments of both optimisers
      state.json                     step, place in the data, window of the cost scale, what training adds
      manifest.json                  size and SHA-256 of every file, written last

No pickle. Random numbers need no state: each step seeds its own from (seed, step).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"  # of each role; without it PEFT would look for a pickle
NEEDED = {"state.json", "tensors.safetensors", f"policy/{WEIGHTS}"}


class TornCheckpoint(ValueError):
    """A checkpoint that is not whole; the message names the file that is wrong."""


def save(
    folder: Path, step: int, router: Any, optimisers: Mapping[str, torch.optim.Optimizer], state: dict
) -> Path:
    """Write FOLDER/step-NNNNNN and return it. Nothing of that name exists until it is complete.

    Raises OSError naming the folder if it cannot be written (a full disk); earlier checkpoints stay.
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, router, optimisers, state | {"step": step})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise OSError(number, f"checkpoint not written ({reason or error})", str(final)) from None
    return final


def _write(folder: Path, router: Any, optimisers: Mapping[str, torch.optim.Optimizer], state: dict) -> None:
    """All files of a checkpoint, on disk when this returns."""
    router.save(folder)
    tensors = {f"value_head.{name}": t for name, t in router.value_head.state_dict().items()}
    for role, optimiser in optimisers.items():
        for i, moments in optimiser.state_dict()["state"].items():
            tensors |= {f"{role}.{i}.{name}": torch.as_tensor(t) for name, t in moments.items()}
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / "tensors.safetensors"
    )
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {str(p.relative_to(folder)): [p.stat().st_size, _sha256(p)] for p in files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def load(path: Path, router: Any, optimisers: Mapping[str, torch.optim.Optimizer]) -> dict:
    """Restore adapters, value head and optimisers from a checkpoint; -> its state. Raises TornCheckpoint."""
    check(path)
    router.load_adapters(path)
    tensors = load_file(path / "tensors.safetensors")
    head = {
        name.removeprefix("value_head."): t for name, t in tensors.items() if name.startswith("value_head.")
    }
    router.value_head.load_state_dict(head)
    for role, optimiser in optimisers.items():
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, t in tensors.items():
            owner, _, rest = name.partition(".")
            if owner == role:
                i, _, moment = rest.partition(".")
                moments.setdefault(int(i), {})[moment] = t
        optimiser.load_state_dict({"state": moments, "param_groups": optimiser.state_dict()["param_groups"]})
    return json.loads((path / "state.json").read_text("utf-8"))


def check(path: Path) -> None:
    """Raise TornCheckpoint unless every file of the manifest is there with its size and hash."""
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise TornCheckpoint(f"{path} is not whole: no readable manifest.json") from None
    roles = {f"{role.name}/{WEIGHTS}" for role in path.iterdir() if role.is_dir()}
    for name in sorted(NEEDED | roles | listed.keys()):
        file = path / name
        if not file.is_file() or listed.get(name) != (file.stat().st_size, _sha256(file)):
            raise TornCheckpoint(f"{path} is not whole: {name} is missing or damaged")


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a folder (None if there is none), and what is wrong with newer ones."""
    torn = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            check(path)
            return path, torn
        except TornCheckpoint as error:
            torn.append(str(error))
    return None, torn


def prune(folder: Path, step: int, keep_last: int, best: int | None) -> None:
    """After the save of `step`: delete all checkpoints but the newest `keep_last` and the one of step `best`.

    What is newer than `step` is torn, since the run goes on from the newest whole one, and goes as well.
    """
    names = sorted(path.name for path in folder.glob("step-*"))
    kept = [name for name in names if name <= f"step-{step:06d}"][-keep_last:]
    if best is not None:
        kept.append(f"step-{best:06d}")
    for path in [*folder.glob("step-*"), *folder.glob(".step-*.partial")]:
        if path.name not in kept:
            shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file or folder to disk: a rename must not overtake what it names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
