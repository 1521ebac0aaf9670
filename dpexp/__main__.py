"""`python -m dpexp`: compose the configuration, run one experiment (or, with -m, several).

`python -m dpexp help` lists what can be chosen, and the other commands.
"""

import errno
import os
import shlex
import sys
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpexp import config
from dpexp.commands import sweep, sweepers, trial, validate
from dpexp.commands.overrides import check, sentence
from dpexp.errors import ConfigError, RecordError

config.register()
sweepers.register()
_usual = warnings.formatwarning
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@hydra.main(config_path=str(config.CONF), config_name="config", version_base="1.3")
def job(cfg: DictConfig) -> float | None:
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        try:
            return _run(cfg)
        except (ConfigError, RecordError) as error:
            sys.exit(f"dpexp: {error}")
    try:
        return _run(cfg)
    except Exception as error:
        from dpexp.reporting.terminal import trial_failed
        from dpexp.tracking.run import record_failure

        record_failure(cfg, error)
        among = trial.current(cfg)
        if among is not None:
            trial_failed(
                among.place, " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("ConfigError: ")
            )
        raise


def _run(cfg: DictConfig) -> float | None:
    validate.check(cfg)
    from dpexp.commands.train import run

    return run(cfg)


def main() -> None:
    warnings.formatwarning = _as_a_sentence
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    os.environ[config.COMMAND] = shlex.join(["dpexp", *sys.argv[1:]])
    if sys.argv[1:2] == ["version"] or "--version" in sys.argv:
        print(f"dpexp {version('dpexp')}")
        return
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
            from dpexp.commands.use_model import evaluate

            evaluate(sys.argv[2:])
            return
        if sys.argv[1:2] == ["predict"]:
            from dpexp.commands.use_model import predict

            predict(sys.argv[2:])
            return
        if sys.argv[1:2] == ["resume"]:
            from dpexp.commands.saved_jobs import resume

            resume(sys.argv[2:], _job)
            return
        if sys.argv[1:2] == ["report"]:
            from dpexp.commands.report import report

            print(f"Report: {report(sys.argv[2:])}")
            return
        if sys.argv[1:2] == ["audit"] and not {"--help", "-h"} & {*sys.argv}:
            from dpexp.commands.overrides import as_audit

            sys.argv[1:] = as_audit(sys.argv[2:])
        if sys.argv[1:2] == ["help"] or {"--help", "-h"} & {*sys.argv}:
            from dpexp.commands.help import help

            print(help([argument for argument in sys.argv[1:] if argument not in ("help", "--help", "-h")]), flush=True)
            return
        check(sys.argv[1:])
        _job()
    except (ConfigError, RecordError) as error:
        sys.exit(f"dpexp: {error}")
    except YAMLError as error:
        sys.exit(f"dpexp: a configuration file is not YAML: {' '.join(str(error).split())}.")
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"dpexp: {sentence(error)}")
    except KeyboardInterrupt:
        print("dpexp: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as of `dpexp help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the end
        sys.exit(141)
    except OSError as error:
        making_a_folder = traceback.extract_tb(error.__traceback__)[-1].name == "mkdir"
        if error.errno not in UNWRITABLE and not (making_a_folder and error.errno == errno.ENOENT):
            raise
        path = error.filename2 or error.filename or os.getcwd()  # of a copy, where it was to go
        sys.exit(f"dpexp: {path} cannot be written: {error.strerror}.")


def _as_a_sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of dpexp's own, without the place in its code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"dpexp: {message}\n"
    return _usual(message, category, filename, lineno, line)


def _job() -> None:
    """Runs the job, or the sweep and then whatever ends it."""
    interrupted, broken = True, False
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if {"-m", "--multirun"} & {*sys.argv}:
            raise ConfigError("-m: start a sweep without torchrun; each trial starts its own processes.")
        if os.environ.get("RANK", "0") != "0":  # the first one's folder is the job's
            sys.argv += ["hydra.output_subdir=null", "hydra.run.dir=."]
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
