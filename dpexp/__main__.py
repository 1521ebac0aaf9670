"""`python -m dpexp`: composes the configuration and runs one experiment (or, with -m, several).

`python -m dpexp help` lists the options, and the other commands.
"""

import errno
import os
import shlex
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape
from yaml import YAMLError

from dpexp import config
from dpexp.commands import sweep, validate
from dpexp.commands.command_line import (
    COMMANDS,
    as_audit,
    as_overrides,
    check,
    help,
    import_targets,
    sentence,
    with_config_file,
)
from dpexp.commands.trial import trial_label
from dpexp.errors import ConfigError, RecordError

config.register()
sweep.register_sweepers()
# Imported when they are called: most need torch.
FUNCTIONS = {
    "account": "dpexp.commands.account",
    "certificate": "dpexp.commands.certificate",
    "copy": "dpexp.commands.copy_options",
    "evaluate": "dpexp.commands.saved_jobs",
    "mirror": "dpexp.commands.mirror",
    "predict": "dpexp.commands.saved_jobs",
    "report": "dpexp.commands.report",
    "sample": "dpexp.commands.sample",
    "schema": "dpexp.commands.table_schema",
    "verify": "dpexp.commands.certificate",
    "version": "dpexp.commands.versions",
}
HELP = {"--help", "-h"}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # which may come without the name of a file


def main() -> None:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    os.environ[config.COMMAND] = shlex.join(["dpexp", *sys.argv[1:]])
    # Must be set before torch is imported: its threads otherwise spin while they wait for one another, which takes the
    # cores of a busy machine from the threads they wait for (40 rounds of the default job took 34 s instead of 4 s).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _dispatch(sys.argv[1:])
    except (ConfigError, RecordError) as error:
        sys.exit(f"dpexp: {error}")
    except YAMLError as error:
        sys.exit(f"dpexp: a configuration file is not YAML: {' '.join(str(error).split())}.")
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"dpexp: {sentence(error)}")
    except KeyboardInterrupt:
        print("dpexp: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # such as `dpexp help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
        sys.exit(141)
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        path = error.filename2 or error.filename or os.getcwd()  # filename2: the destination of a copy
        named = next((one for one in sys.argv[1:] if one.endswith(f"={path}")), path)
        why = "it is a file, and must be a folder" if isinstance(error, FileExistsError) else error.strerror
        sys.exit(f"dpexp: {named} cannot be read or written: {why}.")


def _dispatch(arguments: list[str]) -> None:
    """Runs the command that the arguments begin with, or a job."""
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    if "--version" in arguments:
        print(f"dpexp {version('dpexp')}")
    elif command == "help" or HELP & {*arguments}:
        about = [command] if command not in (None, "help") else [a for a in arguments if a not in ("help", *HELP)]
        print(help(about), flush=True)
    elif command in FUNCTIONS:
        for path in (Path(argument) / "config.yaml" for argument in arguments[1:]):
            if path.is_file():
                import_targets(path.read_text())
        getattr(import_module(FUNCTIONS[command]), command)(arguments[1:])
    elif command == "resume":
        from dpexp.commands.saved_jobs import resume

        _run_hydra(resume(arguments[1:]))
    else:
        arguments = as_audit(arguments[1:]) if command == "audit" else arguments
        if "--cfg" in arguments and "--resolve" not in arguments:
            arguments = [*arguments, "--resolve"]
        check(arguments := with_config_file(arguments))
        _run_hydra(as_overrides(arguments))


def _run_hydra(arguments: list[str]) -> None:
    """Runs the job of a command line; or the trials of a sweep, and then ends the sweep."""
    sys.argv[1:] = arguments
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if {"-m", "--multirun"} & {*arguments}:
            raise ConfigError("-m: start a sweep without torchrun; each trial starts its own processes.")
        if os.environ.get("RANK", "0") != "0":  # the job's folder is that of the main process
            sys.argv += ["hydra.output_subdir=null", "hydra.run.dir=."]
    with sweep.concluded():
        job()


@hydra.main(config_path=str(config.CONF), config_name="config", version_base="1.3")
def job(cfg: DictConfig) -> float | None:
    """One job, or one trial of a sweep; returns its objective."""
    try:
        validate.check(cfg)
        import_targets(OmegaConf.to_yaml(cfg))
        from dpexp.commands.train import run

        return run(cfg)
    except Exception as error:
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            if isinstance(error, ConfigError | RecordError):
                sys.exit(f"dpexp: {error}")
            raise
        from dpexp.commands.description import parent_id, run_name, tags
        from dpexp.reporting.terminal import print_line

        if cfg.tracking.uri is not None and parent_id() is not None and not getattr(error, "tracked", False):
            from dpexp.tracking.run import record_failure

            folder = Path(HydraConfig.get().runtime.output_dir)
            record_failure(config.Tracking(**cfg.tracking), run_name(cfg), tags(cfg, None), error, folder)
        if label := trial_label(cfg):
            words = " ".join(f"{type(error).__name__}: {error}".split())
            print_line(label, f"[bold red]FAILED[/]: {escape(words.removeprefix('ConfigError: '))}")
        raise


if __name__ == "__main__":
    main()
