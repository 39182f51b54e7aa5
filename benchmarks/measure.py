"""How the benchmarks measure: options, alternating runs, the peak of memory, the table.

The versions of a comparison take turns (A B A B ...) in one process, so that whatever else the machine does
meets both alike. What is reported is the ratio of their medians, with the smallest and the largest ratio
of two neighbouring runs. Times in seconds are not comparable between machines; ratios nearly are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).parent / "out"
LAST_START = 60.0  # seconds: so that a benchmark takes minutes on a slow machine too


def options(doc: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--model", default="", help="folder of a real model; default: a random Llama, 31 M")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each version, at most")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does it run, no figures")
    parser.add_argument("--threads", type=int, default=0, help="of torch; default: as it likes")
    given = parser.parse_args(argv)
    keep_freed_memory()
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def keep_freed_memory() -> None:
    """Stop glibc from giving the memory of large tensors back to the system after each use, for both sides:
    fresh pages cost a third of the time of a long prefill.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for any tensor
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@dataclass(frozen=True)
class Timing:
    """Seconds of each run: on the clock, and of processor time, summed over threads."""

    wall: list[float]
    cpu: list[float]


def alternate(versions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Run the versions in turn, `rounds` times each, but begin no round after a minute; the caller has warmed
    them up.
    """
    timings = {name: Timing([], []) for name in versions}
    start = time.perf_counter()
    for n in range(rounds):
        if n and time.perf_counter() - start > LAST_START:
            break
        for name, work in versions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
    return timings


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that was allocated at once during `work`, above what was there before, by torch's profiler."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        work()
    now = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median, and in brackets the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3g}{unit} [{low:.3g} .. {high:.3g}]"


def compare(timings: dict[str, Timing], slow: str, fast: str, per: float = 1.0) -> dict[str, Any]:
    """One row of a table: both times (divided by `per`), and how many times faster `fast` is."""
    a, b = timings[slow], timings[fast]
    ratios = [x / y for x, y in zip(a.wall, b.wall, strict=True)]
    cpu = [x / y for x, y in zip(a.cpu, b.cpu, strict=True)]
    return {
        f"{slow}, s": spread([x / per for x in a.wall]),
        f"{fast}, s": spread([x / per for x in b.wall]),
        "ratio": f"{statistics.median(a.wall) / statistics.median(b.wall):.2f}x "
        f"[{min(ratios):.2f} .. {max(ratios):.2f}]",
        "ratio of CPU time": f"{statistics.median(a.cpu) / statistics.median(b.cpu):.2f}x "
        f"[{min(cpu):.2f} .. {max(cpu):.2f}]",
    }


def report(name: str, given: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows as a Markdown table and, unless the sizes are tiny, keep them as JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(c, "")) for c in columns] for row in rows)]
    model = Path(given.model).name  # of a folder, which lies elsewhere on another machine
    print(f"\n### {name} ({model or 'random Llama, 31 M'}, {machine()})\n")
    print("\n".join("| " + " | ".join(line) + " |" for line in lines), flush=True)
    if not given.tiny:
        OUT.mkdir(exist_ok=True)
        record = {"benchmark": name, "model": model, "machine": machine(), "rows": rows}
        (OUT / f"{name}{'-real' * bool(given.model)}.json").write_text(json.dumps(record, indent=1) + "\n")
    return rows


def machine() -> str:
    """Threads and load, which say how far the figures can be trusted."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    load = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    return f"{device}, {load}, torch {torch.__version__}"
