"""`python -m dpexp version`: versions and machine, for bug reports."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version as version_of

import torch

from dpexp.config import CONF
from dpexp.tracking.provenance import commit


def version(arguments: Sequence[str]) -> None:
    """Prints versions, dpexp's commit if it runs from a checkout, and the machine."""
    found, cuda = commit(CONF.parent), torch.cuda.is_available()
    changed = " with changes" if found.get("dpexp.dirty") == "yes" else ""
    print(f"dpexp {version_of('dpexp')}" + (f", commit {found['dpexp.commit']}{changed}" if found else ""))
    names = ("pytorch-lightning", "mlflow", "hydra-core", "dp-accounting")
    versions = [f"torch {torch.__version__}", *(f"{name} {version_of(name)}" for name in names)]
    print(f"Python {platform.python_version()}", *versions, sep=", ")
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else f"{platform.machine()}, no GPU"
    print(f"{device}; {os.cpu_count()} cores; {platform.platform()}")
