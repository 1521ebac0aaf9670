"""The processes of a job, started here or by torchrun, SLURM or submitit.

Each has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as torchrun sets them. Process 0
writes, prints and tracks; the others only train with it.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch import distributed, multiprocessing

from dpexp import config
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import OTHERS, REASONS

_MAX_MESSAGE = 10_000  # characters: a longer one would block the queue until it is read
_SECONDS = 5.0  # that processes have to end by themselves after one of them has ended


def join_and_count(cfg: DictConfig) -> int:
    """Joins the processes that a cluster has started, and returns how many there are for a job.

    Raises:
        ConfigError: they are not supported.
    """
    strategy, devices, nodes = cfg.trainer.strategy, cfg.trainer.devices, cfg.trainer.num_nodes
    if strategy not in ("auto", "ddp"):
        classes = {"fsdp": "FSDPStrategy", "fsdp2": "ModelParallelStrategy", "deepspeed": "DeepSpeedStrategy"}
        name = classes.get(str(strategy).partition("_")[0], "")
        raise ConfigError(f"trainer.strategy={strategy} cannot be honoured: {REASONS.get(name, OTHERS)}.")
    for name, value in (("devices", devices), ("num_nodes", nodes)):
        if value < 1:
            raise ConfigError(f"trainer.{name}={value} must be at least 1.")
    count = devices * nodes
    if not cfg.train:
        return 1
    _read_cluster_environment()
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started not in (1, count):
        raise ConfigError(
            f"{started} processes were started, but trainer.devices={devices} and trainer.num_nodes={nodes} require "
            f"{count}; let devices times nodes be {started}, with trainer.strategy=ddp."
        )
    for key, wrong, why in (
        ("trainer.strategy", strategy != "ddp", "several processes need trainer.strategy=ddp"),
        ("trainer.num_nodes", nodes > 1 and started == 1,
         "a job starts processes on its own machine only; start it on every node, with torchrun, srun or "
         "hydra/launcher=submitit_slurm"),
        ("privacy.enabled", not cfg.privacy.enabled,
         "only a private job trains in several processes; choose trainer.devices=1"),
        ("audit", cfg.audit is not None, "an audit's canaries are in one process; choose trainer.devices=1"),
        ("diagnostics", cfg.diagnostics != "none", "it would show one process's records; choose trainer.devices=1"),
    ):  # fmt: skip
        if count > 1 and wrong:
            value = "…" if key == "audit" else OmegaConf.select(cfg, key)
            raise ConfigError(f"{key}={value} with trainer.devices={devices}: {why}.")
    return count


def _read_cluster_environment() -> None:
    """Sets torchrun's variables if SLURM or submitit started the processes."""
    if "RANK" in os.environ:
        return
    if "SUBMITIT_EXECUTOR" in os.environ:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        return
    from dpexp._lightning_compat import environment

    if environment("SLURMEnvironment").detect() and int(os.environ["SLURM_NTASKS"]) > 1:
        slurm = environment("SLURMEnvironment")()
        _set_environment(
            slurm.global_rank(), slurm.world_size(), slurm.local_rank(), slurm.main_address, slurm.main_port,
            GROUP_RANK=slurm.node_rank(),
        )  # fmt: skip


def _set_environment(rank: int, count: int, local_rank: int, address: str, port: int, **more: int) -> None:
    """Sets torchrun's variables."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local_rank), "MASTER_ADDR": address,
        "MASTER_PORT": str(port), **{name: str(value) for name, value in more.items()},
    }  # fmt: skip


def rank() -> int:
    """The number of this process among those of the job; 0 if it is the only one, or starts the others."""
    return int(os.environ.get("RANK", 0)) if is_one_of_several() else 0


def is_one_of_several() -> bool:
    """Whether this is one of a job's processes, rather than the one that starts them."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def start(job: Callable[[DictConfig], Any], cfg: DictConfig, count: int) -> Any:
    """Runs a job in `count` new processes, and returns the result of process 0.

    Raises:
        ConfigError: that of process 0, or a process was killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (job, cfg, HydraConfig.instance().cfg, count, port, results)
    started = multiprocessing.start_processes(_process, arguments, count, join=False, start_method="spawn")

    ended_by = signal.SIGINT

    def stop(*_: Any) -> None:
        nonlocal ended_by
        ended_by = signal.SIGTERM
        for process in started.processes:
            process.terminate()
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_main else None
    ends = "so all others end; the ledger has every round that was released."
    try:
        connection.wait([process.sentinel for process in started.processes])
        _wait(started, _SECONDS)
        for index, process in enumerate(started.processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                raise ConfigError(f"process {index} of {count} was ended by {name}, {ends}")
        while not started.join():
            pass
    except KeyboardInterrupt:  # a terminal sends it to all processes
        _wait(started, 6 * _SECONDS)
        sys.exit(128 + ended_by)
    except multiprocessing.ProcessExitedException as error:
        if results.empty():
            raise ConfigError(f"{error}, {ends}") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        for process in started.processes:
            process.terminate()
        _wait(started, _SECONDS)
        for process in started.processes:
            process.kill()
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result


def _wait(started: Any, seconds: float) -> None:
    """Waits until all processes have ended, for at most so many seconds."""
    until = time.monotonic() + seconds
    for process in started.processes:
        process.join(max(0.0, until - time.monotonic()))


def _process(
    rank: int, job: Callable[[DictConfig], Any], cfg: DictConfig, hydra: Any, count: int, port: int, results: Any
) -> None:
    """Runs a job in a new process, and puts the result of process 0, or a ConfigError, into a queue."""
    setup_globals()
    config.register()
    HydraConfig.instance().cfg = hydra
    _set_environment(rank, count, rank, "127.0.0.1", port, LOCAL_WORLD_SIZE=count)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if rank == 0 else lambda *_: os._exit(1))
    try:
        result = job(cfg)
    except ConfigError as error:
        results.put(ConfigError(str(error)[:_MAX_MESSAGE]))
        sys.exit(1)
    except Exception:
        if rank > 0:  # process 0's is raised where the processes were started
            traceback.print_exc()
        raise
    if rank == 0:
        results.put(result)


@contextmanager
def connected(cfg: DictConfig, count: int) -> Iterator[None]:
    """Connects a job's processes. Process 0 reports a ConfigError; the others end silently, and after it."""
    if count == 1:
        yield
        return
    on_gpu = cfg.trainer.accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield
    except ConfigError:
        if rank() == 0:
            raise
        time.sleep(_SECONDS / 2)
        sys.exit(1)
    finally:
        with suppress(RuntimeError):
            distributed.destroy_process_group()


def use_threads(cfg: DictConfig) -> None:
    """Divides the cores among parallel trials, and among the processes of a job."""
    threads, hydra = cfg.trainer.threads, HydraConfig.get()
    launcher = hydra.runtime.choices.get("hydra/launcher", "basic")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is None and "LOCAL_WORLD_SIZE" in os.environ:
        threads = max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"]))
    elif threads is None and hydra.mode == RunMode.MULTIRUN and launcher == "joblib":
        jobs = hydra.launcher.n_jobs
        threads = max(1, cores // (cores if jobs < 1 else jobs))
    elif threads is None and hydra.mode == RunMode.MULTIRUN and launcher != "basic":
        threads = hydra.launcher.get("cpus_per_task") or 1
    if threads is not None:
        torch.set_num_threads(threads)
