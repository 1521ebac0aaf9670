"""A job's processes, started here or by torchrun, SLURM or submitit. The first writes, prints and tracks; the others
only train with it.

However they were started, each has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as
torchrun sets them.
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
from omegaconf import DictConfig
from torch import distributed, multiprocessing

from dpexp import config
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import LOST, OTHERS, REASONS

_WORDS = 10_000  # of an error
_SECONDS = 5.0  # that processes have for ending by themselves after one of them has


def asked(cfg: DictConfig) -> int:
    """How many processes a job trains in.

    Raises:
        ConfigError: so many cannot be had, or not for such a job.
    """
    given = cfg.trainer
    strategy, devices, nodes = given.get("strategy", "auto"), given.get("devices", 1), given.get("num_nodes", 1)
    if strategy not in ("auto", "ddp"):
        kinds = {"fsdp": "FSDPStrategy", "fsdp2": "ModelParallelStrategy", "deepspeed": "DeepSpeedStrategy"}
        name = next((kind for word, kind in kinds.items() if str(strategy).partition("_")[0] == word), "")
        raise ConfigError(f"trainer.strategy={strategy} cannot be honoured: {REASONS.get(name, OTHERS)}.")
    for name, value in (("devices", devices), ("num_nodes", nodes)):
        if value < 1:
            raise ConfigError(f"trainer.{name}={value} must be at least 1.")
    count = devices * nodes
    if not cfg.train:
        return 1
    _take_from_outside()
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started not in (1, count):
        raise ConfigError(
            f"{started} processes were started, but trainer.devices={devices} and trainer.num_nodes={nodes} ask for "
            f"{count}; let devices times nodes be {started}, with trainer.strategy=ddp."
        )
    if count == 1:
        return 1
    _check(cfg, strategy, devices, nodes, started)
    return count


def _check(cfg: DictConfig, strategy: str, devices: int, nodes: int, started: int) -> None:
    if strategy != "ddp":
        raise ConfigError(
            f"trainer.devices={devices} with trainer.num_nodes={nodes} and trainer.strategy={strategy}: several "
            "processes need trainer.strategy=ddp."
        )
    if nodes > 1 and started == 1:
        raise ConfigError(
            f"trainer.num_nodes={nodes}: a job starts processes on its own machine only; start it on every node, with "
            "torchrun, srun or hydra/launcher=submitit_slurm."
        )
    for key, wrong, why in (
        ("privacy.enabled", not cfg.privacy.enabled, "only a private job trains in several processes"),
        ("audit", cfg.audit is not None, "an audit's canaries are in one process"),
        ("diagnostics", cfg.diagnostics != "none", "it would show one process's records"),
    ):
        if wrong:
            value = cfg.privacy.enabled if key == "privacy.enabled" else cfg[key] if key == "diagnostics" else "given"
            raise ConfigError(f"{key}={value} with trainer.devices={devices}: {why}; choose trainer.devices=1.")


def _take_from_outside() -> None:
    """Where SLURM or submitit started processes, says so as torchrun would."""
    if "RANK" in os.environ:
        return
    if "SUBMITIT_EXECUTOR" in os.environ:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        return
    from pytorch_lightning.plugins.environments import SLURMEnvironment

    if SLURMEnvironment.detect() and int(os.environ["SLURM_NTASKS"]) > 1:
        found = SLURMEnvironment()
        os.environ |= {
            "RANK": str(found.global_rank()), "WORLD_SIZE": str(found.world_size()),
            "GROUP_RANK": str(found.node_rank()), "LOCAL_RANK": str(found.local_rank()),
            "MASTER_ADDR": found.main_address, "MASTER_PORT": str(found.main_port),
        }  # fmt: skip


def rank() -> int:
    """Of this process; 0 where there is one only."""
    return int(os.environ.get("RANK", 0)) if begun() else 0


def begun() -> bool:
    """Whether this is one of a job's processes, rather than the one that is to start them."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def start(job: Callable[[DictConfig], Any], cfg: DictConfig, count: int) -> Any:
    """Runs a job in so many new processes, and returns what the first one does.

    Raises:
        ConfigError: that of the first process, or: one was ended from outside.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (job, cfg, HydraConfig.instance().cfg, count, port, results)
    begun = multiprocessing.start_processes(_process, arguments, count, join=False, start_method="spawn")

    ended_by = signal.SIGINT

    def stop(*_: Any) -> None:
        nonlocal ended_by
        ended_by = signal.SIGTERM
        for process in begun.processes:
            process.terminate()
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        connection.wait([process.sentinel for process in begun.processes])
        _wait(begun, _SECONDS)
        codes = [process.exitcode for process in begun.processes]
        for ended, code in enumerate(codes):
            if code is not None and code < 0:
                raise ConfigError(
                    f"process {ended} of {count} was ended by {signal.Signals(-code).name}, and so all others end; the "
                    "ledger has every round that was released."
                )
        while not begun.join():
            pass
    except KeyboardInterrupt:  # which a terminal sends to all
        _wait(begun, 6 * _SECONDS)
        sys.exit(128 + ended_by)
    except multiprocessing.ProcessExitedException as error:
        if results.empty():
            words = "and so all others end; the ledger has every round that was released"
            raise ConfigError(f"{error}, {words}.") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        for process in begun.processes:
            process.terminate()
        _wait(begun, _SECONDS)
        for process in begun.processes:
            process.kill()
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result


def _wait(begun: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in begun.processes:
        process.join(max(0.0, until - time.monotonic()))


def _process(
    rank: int, job: Callable[[DictConfig], Any], cfg: DictConfig, hydra: Any, count: int, port: int, results: Any
) -> None:
    setup_globals()
    config.register()
    HydraConfig.instance().cfg = hydra
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(count),
    }  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if rank == 0 else lambda *_: os._exit(1))
    try:
        result = job(cfg)
    except ConfigError as error:
        results.put(ConfigError(str(error)[:_WORDS]))  # more would not go through before somebody reads
        sys.exit(1)
    except Exception:
        if rank > 0:  # of the first one's whoever started them hears
            traceback.print_exc()
        raise
    if rank == 0:
        results.put(result)


@contextmanager
def connected(cfg: DictConfig, count: int) -> Iterator[None]:
    """Meanwhile a job's processes can exchange what they must. All but the first end without a word, and later: the
    first one says what is to be said."""
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


def tell(what: Any = None) -> Any:
    """What the first process says, in all."""
    box = [what]
    if distributed.is_available() and distributed.is_initialized():
        try:
            distributed.broadcast_object_list(box, 0, device=torch.device("cpu"))
        except RuntimeError as error:
            raise ConfigError(LOST) from error
    return box[0]


def use_threads(cfg: DictConfig) -> None:
    """Parallel trials, and the processes of a job, share the cores instead of fighting for them."""
    threads = cfg.trainer.threads
    hydra = HydraConfig.get()
    if threads is None and "LOCAL_WORLD_SIZE" in os.environ:
        threads = max(1, _cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
    elif threads is None and hydra.mode == RunMode.MULTIRUN:
        launcher = hydra.runtime.choices.get("hydra/launcher", "basic")
        if launcher == "joblib":
            jobs = hydra.launcher.n_jobs
            threads = max(1, _cores() // (_cores() if jobs < 1 else jobs))
        elif launcher != "basic":
            threads = hydra.launcher.get("cpus_per_task") or 1
    if threads is not None:
        torch.set_num_threads(threads)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
