"""Where a run comes from: versions, code, machine.

Errors in finding the code's commit never fail a job.
"""

import os
import platform
import re
import socket
from importlib.metadata import version
from pathlib import Path

from dpexp import __version__
from dpexp.config import COMMAND

PARENT = "DPEXP_PARENT_RUN"  # an environment variable, which reaches the processes of every launcher
MAX_NAME = 250  # characters of a run's name
HOST = socket.gethostname()


def provenance() -> dict[str, str]:
    """A run's provenance tags."""
    packages = {"torch": "torch", "lightning": "pytorch-lightning", "accounting": "dp-accounting"}
    found = {f"dpexp.{name}": version(package) for name, package in packages.items()}
    found |= {"dpexp.version": __version__, "dpexp.python": platform.python_version()}
    found |= {"dpexp.host": HOST, "dpexp.pid": str(os.getpid())}
    found |= {"dpexp.command": without_passwords(os.environ.get(COMMAND, "dpexp")), "mlflow.source.name": "dpexp"}
    return found | commit()


def commit(folder: Path | None = None) -> dict[str, str]:
    """The commit of a checkout, by default of the working directory, and whether files that git knows differ."""
    try:
        from git import Repo  # fails if there is no git

        with Repo(folder, search_parent_directories=folder is None) as repository:
            found = repository.head.commit.hexsha
            dirty = "yes" if repository.is_dirty() else "no"
    except Exception:
        return {}
    return {"mlflow.source.git.commit": found, "dpexp.commit": found, "dpexp.dirty": dirty}


def provenance_of_resume() -> dict[str, str]:
    """The provenance tags of a resumed job: those of now, under `dpexp.resumed`. The tags of the first start stay.

    Only the first start's host and process id are replaced, since they show whether the run is alive.
    """
    found = {key.removeprefix("dpexp.").removeprefix("mlflow."): value for key, value in provenance().items()}
    own = {f"dpexp.resumed.{key}": value for key, value in found.items() if not key.startswith("source.")}
    return own | {"dpexp.host": HOST, "dpexp.pid": str(os.getpid())}


def valid_name(name: str) -> str:
    """Drops the characters that MLflow allows in no name."""
    return re.sub(r"[^\w.\- :/]", "", name)


def without_passwords(text: str) -> str:
    """Masks the passwords of addresses: after a user's name, as a token in its place, and in a query."""
    text = re.sub(r"(://[^/:\s]*):\S*@", r"\1:…@", text)
    text = re.sub(r"(https?://)[^/:@\s]*@", r"\1:…@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:password|passwd|pwd|secret|token|key)[^=&\s]*=)[^&\s'\"]+", r"\1…", text)


def one_line(error: BaseException) -> str:
    """The message of an error in one line, without passwords of addresses."""
    return without_passwords(" ".join(str(error).split()))
