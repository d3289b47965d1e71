"""Process groups for tests: a script that starts the ranks of one world after the other, and who starts that script.

Under gloo the ranks are forks of one process, so that torch, Triton and diffusers are imported once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

START_S = 400  # for a world to end


class World(NamedTuple):
    """This process among the others of its world, and the folder where its findings go."""

    rank: int
    size: int
    backend: str
    folder: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.backend == "nccl" else torch.device("cpu")

    def write(self, found: dict[str, Any], note: str = "") -> None:
        """Keep what was found so far."""
        (self.folder / f"{self.rank}.json").write_text(json.dumps(found))
        with (self.folder / "notes").open("a") as file:
            file.write(f"rank {self.rank}: {note}\n")


def start(script: Path, backend: str, folder: Path, sizes: list[int]) -> dict[int, list[dict[str, Any]]]:
    """Run the script's worlds; returns what each rank found, by size of the world."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), backend, str(folder), *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {size: [_read(folder / str(size) / f"{rank}.json") for rank in range(size)] for size in sizes}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(run: Callable[[World], None], timeout: float) -> None:
    """Start the worlds that the command line asks for; exits with 1 if a rank fails or a world takes too long."""
    backend, folder, *sizes = sys.argv[1:]
    context = multiprocessing.get_context("fork" if backend == "gloo" else "spawn")
    for size in map(int, sizes):
        place = Path(folder) / str(size)
        place.mkdir()
        ranks = [World(rank, size, backend, place) for rank in range(size)]
        processes = [context.Process(target=_rank, args=(run, world, timeout)) for world in ranks]
        for process in processes:
            process.start()
        end = time.monotonic() + START_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        for process in processes:
            process.kill()
        if failed:
            raise SystemExit(f"of {size} ranks these failed or did not end: {failed}")


def _rank(run: Callable[[World], None], world: World, timeout: float) -> None:
    torch.set_num_threads(1)
    if world.backend == "nccl":
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        init_method=f"file://{world.folder}/meeting",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )
    run(world)
    if world.backend == "nccl":
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without waiting for a group that may be broken
