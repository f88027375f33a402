"""How jobs that run at once share a machine."""

import os

import pytest

from lightning_qrl.ablation.launchers import choose_jobs, share, wished_threads
from lightning_qrl.ablation.local import LocalLauncher, gpus_at, visible_gpus


@pytest.mark.parametrize(
    ("asked", "cores", "gpus", "jobs"),
    [(None, 1, 0, 1), (None, 2, 0, 1), (None, 16, 0, 8), (None, 16, 4, 4), (3, 16, 4, 3)],
)
def test_jobs_are_one_a_gpu_or_for_two_cores(asked, cores, gpus, jobs):
    assert choose_jobs(asked, cores, gpus) == jobs


def test_threads_and_gpus_are_parted_equally():
    for jobs in range(1, 12):
        each = share(jobs, 8, 4)
        assert each.threads * jobs <= max(8, jobs)
        assert each.gpus * jobs <= 4
    assert share(3, 8, 0).environment()["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("said", "threads"), [("1", 1), ("3", 3), ("64", 4), ("3,2", 3), ("", 4), ("0", 4), ("x", 4)]
)
def test_a_job_has_no_more_threads_than_the_user_wants(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert share(2, 8, 0, wished_threads()).threads == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert wished_threads() is None


def test_the_launcher_asks_the_user(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert LocalLauncher(1).about == "one at a time, 1 thread"


def test_no_gpu_is_given_twice_while_there_are_enough():
    gpus = ["0", "1", "2", "3"]
    given = [gpus_at(place, 2, gpus)["CUDA_VISIBLE_DEVICES"] for place in range(2)]
    assert given == ["0,1", "2,3"]
    by_turns = [gpus_at(place, 6, gpus)["CUDA_VISIBLE_DEVICES"] for place in range(6)]
    assert by_turns == ["0", "1", "2", "3", "0", "1"]
    assert gpus_at(0, 2, []) == {}


def test_only_the_gpus_that_one_may_use_are_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    assert LocalLauncher(None).jobs == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert LocalLauncher(None).jobs == max(1, len(os.sched_getaffinity(0)) // 2)
