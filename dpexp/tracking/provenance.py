"""Where a run came from: versions, code, person, machine. Nothing here fails a job."""

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
# Of these files a patch holds the text; of others, which may be data, only how many changed.
CODE = ("*.py", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.sh")
_MOST = 1_000_000  # bytes of a patch
_PATIENCE = 10  # seconds for git


def origin() -> dict[str, str]:
    """Tags of a run, MLflow's own included, which fill its columns Source, Version and Created by."""
    command = os.environ.get(COMMAND, "dpexp")
    found = {f"dpexp.{name}": _version(package) for name, package in _PACKAGES.items()}
    found |= {"dpexp.python": platform.python_version(), "dpexp.command": without_passwords(command)}
    found |= {"dpexp.host": HOST, "mlflow.user": _user()}
    found |= {"mlflow.source.name": "dpexp", "mlflow.source.type": "LOCAL"}
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        found |= {"mlflow.source.git.commit": commit, "dpexp.commit": commit, "dpexp.dirty": _dirty()}
    return found


def origin_resumed() -> dict[str, str]:
    """Tags of a run that is gone on with: those of its first start stay, and the last resume has its own beside them.

    Where it runs now, which tells whether it still does, is no fact of origin.
    """
    found = {key.removeprefix("dpexp.").removeprefix("mlflow."): value for key, value in origin().items()}
    own = {f"dpexp.resumed.{key}": value for key, value in found.items() if not key.startswith("source.")}
    return own | {"dpexp.host": HOST, "dpexp.pid": str(os.getpid())}


def write_patch(folder: Path, name: str = PATCH) -> Path | None:
    """How the code in the working directory differs from its commit, as a file; None if it does not, or is in none."""
    changed = _git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--", *CODE)
    new = _new_files()
    if changed is None or not (changed or new):
        return None
    text = "".join(f"# not in git: {name}\n" for name in new) + changed + "\n"
    kept = text.encode()[:_MOST]
    if len(kept) < len(text.encode()):
        kept += f"\n# cut off after {_MOST} bytes\n".encode()
    path = folder / name
    path.write_bytes(kept)
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
    """Those of addresses are masked."""
    return re.sub(r"(://[^/@:\s]*):[^@\s]*@", r"\1:…@", text)


def _dirty() -> str:
    changed = (_git("diff", "HEAD", "--name-only") or "").splitlines()
    new = _new_files()
    if not changed and not new:
        return "no"
    return f"yes: {len(changed)} files changed, {len(new)} new"


def _new_files() -> list[str]:
    """Programs that git does not know. New configuration files are in the run's config.yaml with what they say."""
    return (_git("ls-files", "--others", "--exclude-standard", "--", "*.py") or "").splitlines()


def _git(*arguments: str) -> str | None:
    """What git says of the whole work tree that the working directory is in; None if it is in none."""
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
