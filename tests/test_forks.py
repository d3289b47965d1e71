"""Forked children: their calls are counted and written down as theirs, and no lock of the parent stops them.

In processes of their own with one thread: a child of a process that has used OpenMP's threads hangs in torch itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sdpa_router.run_file import read_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork()")

BEGIN = """
import multiprocessing, os, signal, sys, threading, torch, torch.nn.functional as F, sdpa_router
torch.set_num_threads(1)
x = torch.randn(1, 2, 8, 16)

def attend(times, *arguments):
    with sdpa_router.route():
        for _ in range(times):
            F.scaled_dot_product_attention(x, x, x, *arguments)
    return sdpa_router.stats()["calls"]

attend(3)
"""
FORK = """
child = os.fork()
if not child:
    signal.alarm(30)  # it ends, whatever it waits for
{}
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
"""
PROCESS = """
context = multiprocessing.get_context("fork")
child = context.Process(target=attend, args=(5,))
child.start()
child.join()
"""
POOL = """
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(attend, [2, 3], chunksize=1) == [2, 5]
    pool.close()
    pool.join()
"""
LOADER = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return attend(1) + sum(worker.num_workers for worker in [torch.utils.data.get_worker_info()])

loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")
assert [int(number) for number in loader] == [2, 3, 4, 5, 6]
"""
BY = {"os.fork": FORK.format("    assert attend(5) == 5"), "Process": PROCESS, "Pool": POOL, "DataLoader": LOADER}


def run_script(script, **variables):
    environment = {**os.environ, **variables}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.parametrize("by", BY)
def test_calls_of_a_child_are_in_the_file_once(tmp_path, by):
    path = tmp_path / "run.jsonl"
    told = run_script(BY[by], SDPA_ROUTER_JSONL=str(path), SDPA_ROUTER_LOG="info").stderr.splitlines()
    run = read_run(path)
    assert run.complete
    assert [row.count for row in run.rows] == [8]
    assert sorted(line.partition(" attention")[0] for line in told) == ["sdpa_router: 3", "sdpa_router: 5"]


def test_a_child_without_calls_says_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    done = run_script(FORK.format("    pass"), SDPA_ROUTER_JSONL=str(path), SDPA_ROUTER_LOG="info")
    (line,) = done.stderr.splitlines()
    assert line.startswith("sdpa_router: 3 attention calls")
    assert read_run(path).calls == 3


def test_an_unknown_level_is_told_once():
    (line,) = run_script(PROCESS, SDPA_ROUTER_LOG="debug").stderr.splitlines()
    assert line == "sdpa_router: SDPA_ROUTER_LOG=debug means nothing; accepted: info"


def test_a_child_that_ends_without_handlers_has_its_rows_in_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    run_script(FORK.format("    attend(5, torch.zeros(8, 8)); os._exit(0)"), SDPA_ROUTER_JSONL=str(path))
    run = read_run(path)
    assert not run.complete, "which the report says"
    assert [row.count for row in run.rows] == [3, 1]


def test_a_recording_of_a_child_holds_what_the_child_called():
    run_script(
        """
with sdpa_router.record() as seen:
    attend(3)
    child = os.fork()
    if not child:
        signal.alarm(30)
        attend(1)
        assert [found["count"] for found in seen.records] == [1]
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert [found["count"] for found in seen.records] == [3]
"""
    )


def test_a_lock_that_another_thread_holds_stops_no_child():
    child = "    assert attend(5) == 5; sdpa_router.unregister_backend('mine'); mask_summary.forget()"
    run_script(
        """
from sdpa_router import Backend, BackendLimits, mask_summary, patch, settings, sighting
from sdpa_router.backends import base

sdpa_router.register_backend(Backend("mine", BackendLimits(), lambda call, settings: iter(()), None.__eq__))
locks = (sighting.lock, settings._lock, base._lock, patch._lock, mask_summary._lock)

def hold(lock, held):
    with lock:
        held.set()
        threading.Event().wait(0.5)

for lock in locks:
    held = threading.Event()
    threading.Thread(target=hold, args=(lock, held)).start()
    held.wait()
"""
        + FORK.format(child)
    )
