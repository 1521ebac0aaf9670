"""Provenance of a run: versions, code, user, machine. Errors here never fail a job."""

import getpass
import os
import platform
import re
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dpexp.config import COMMAND

HOST = socket.gethostname()
PATCH = "changes.patch"
PATCH_RESUMED = "changes_resumed.patch"
# A patch has the changes of these files; other files may be data, of which only the number of changed ones is logged.
CODE = ("*.py", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.sh")
_MAX_PATCH = 1_000_000  # bytes
_PATIENCE = 10  # seconds for git


def provenance() -> dict[str, str]:
    """A run's provenance tags, with those of MLflow's columns Source, Version and Created by."""
    command = os.environ.get(COMMAND, "dpexp")
    found = {f"dpexp.{name}": _version(package) for name, package in _PACKAGES.items()}
    found |= {"dpexp.python": platform.python_version(), "dpexp.command": without_passwords(command)}
    found |= {"dpexp.host": HOST, "mlflow.user": _user()}
    found |= {"mlflow.source.name": "dpexp", "mlflow.source.type": "LOCAL"}
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        found |= {"mlflow.source.git.commit": commit, "dpexp.commit": commit, "dpexp.dirty": _dirty()}
    return found


def provenance_of_resume() -> dict[str, str]:
    """Provenance tags of a resume, under `dpexp.resumed`; the tags of the first start stay.

    Host and process id are replaced: they show whether the run is alive.
    """
    found = {key.removeprefix("dpexp.").removeprefix("mlflow."): value for key, value in provenance().items()}
    own = {f"dpexp.resumed.{key}": value for key, value in found.items() if not key.startswith("source.")}
    return own | {"dpexp.host": HOST, "dpexp.pid": str(os.getpid())}


def write_patch(folder: Path, name: str = PATCH) -> Path | None:
    """Writes the code's changes since the last commit to a file; None if there are none, or there is no repository."""
    changed = _git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--", *CODE)
    new = _new_files()
    if changed is None or not (changed or new):
        return None
    text = "".join(f"# not in git: {name}\n" for name in new) + changed + "\n"
    content = text.encode()[:_MAX_PATCH]
    if len(content) < len(text.encode()):
        content += f"\n# cut off after {_MAX_PATCH} bytes\n".encode()
    path = folder / name
    path.write_bytes(content)
    return path


_PACKAGES = {"version": "dpexp", "torch": "torch", "lightning": "pytorch-lightning", "accounting": "dp-accounting"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a password file
        return "unknown"


def without_passwords(text: str) -> str:
    """Masks the passwords of addresses."""
    return re.sub(r"(://[^/@:\s]*):[^@\s]*@", r"\1:…@", text)


def _dirty() -> str:
    changed = (_git("diff", "HEAD", "--name-only") or "").splitlines()
    new = _new_files()
    if not changed and not new:
        return "no"
    return f"yes: {len(changed)} files changed, {len(new)} new"


def _new_files() -> list[str]:
    """Untracked Python files. The values of new configuration files are in the run's config.yaml."""
    return (_git("ls-files", "--others", "--exclude-standard", "--", "*.py") or "").splitlines()


def _git(*arguments: str) -> str | None:
    """Runs git in the work tree that contains the working directory; None if there is none."""
    top = _run("rev-parse", "--show-toplevel")
    return _run("-C", top, *arguments) if top else None


def _run(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            capture_output=True, timeout=_PATIENCE, check=True, stdin=subprocess.DEVNULL,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip("\n")
