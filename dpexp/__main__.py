"""`python -m dpexp`: compose the configuration, run one experiment (or, with -m, several).

`python -m dpexp account` computes what ledgers cost.
"""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dpexp import config
from dpexp.commands import sweep
from dpexp.commands.overrides import check, sentence
from dpexp.errors import ConfigError

config.register()


@hydra.main(config_path=str(config.CONF), config_name="config", version_base="1.3")
def job(cfg: DictConfig) -> float | None:
    from dpexp.commands.train import run

    if HydraConfig.get().mode != RunMode.MULTIRUN:
        try:
            return run(cfg)
        except ConfigError as error:
            sys.exit(f"dpexp: {error}")
    try:
        return run(cfg)
    except Exception as error:
        from dpexp.tracking.run import record_failure

        record_failure(cfg, error)
        raise


def main() -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    # Before torch: its threads would otherwise wait for one another by spinning, which on a busy machine takes the
    # cores from those they wait for (40 rounds of the default job took 34 s there, and 4 s with this).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "--cfg" in sys.argv and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")
    try:
        if sys.argv[1:2] == ["account"]:
            from dpexp.commands.account import account

            account(sys.argv[2:])
            return
        if sys.argv[1:2] == ["evaluate"]:
            from dpexp.commands.evaluate import evaluate

            evaluate(sys.argv[2:])
            return
        if sys.argv[1:2] == ["predict"]:
            from dpexp.commands.predict import predict

            predict(sys.argv[2:])
            return
        if sys.argv[1:2] == ["resume"]:
            from dpexp.commands.resume import resume

            resume(sys.argv[2:], _job)
            return
        if sys.argv[1:2] == ["report"]:
            from dpexp.commands.report import report

            print(f"Report: {report(sys.argv[2:])}")
            return
        check(sys.argv[1:])
        _job()
    except ConfigError as error:
        sys.exit(f"dpexp: {error}")
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"dpexp: {sentence(error)}")


def _job() -> None:
    """Runs the job, or the sweep and then whatever ends it."""
    interrupted, broken = True, False
    try:
        job()
        interrupted = False
    except Exception as error:
        interrupted, broken = False, True
        if sweep.under_way() and not isinstance(error, ConfigError | HydraException | OmegaConfBaseException):
            words = f"{type(error).__name__}: {error}".split()
            raise ConfigError(f"the sweep did not finish: {' '.join(words[:40])}") from error
        raise
    finally:
        sweep.conclude(interrupted, broken)


if __name__ == "__main__":
    main()
