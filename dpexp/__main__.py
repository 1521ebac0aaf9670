"""`python -m dpexp`: compose the configuration, run one experiment (or, with -m, several)."""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dpexp import config
from dpexp.errors import ConfigError
from dpexp.overrides import check

config.register()


@hydra.main(config_path=str(config.CONF), config_name="config", version_base="1.3")
def job(cfg: DictConfig) -> float | None:
    from dpexp.experiment import run

    try:
        return run(cfg)
    except ConfigError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        sys.exit(f"dpexp: {error}")


def main() -> None:
    try:
        check(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"dpexp: {error}")
    if "--cfg" in sys.argv and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")
    job()


if __name__ == "__main__":
    main()
