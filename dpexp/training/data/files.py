"""Standard data files: found under a root, or fetched once and checked."""

from pathlib import Path

import pooch

from dpexp.errors import ConfigError


def standard_file(root: str, url: str, md5: str) -> Path:
    """The path of a data set's standard file under `root`, fetched from `url` if it is not there.

    Raises:
        ConfigError: the file is neither there nor to be had; says where to put it.
    """
    name = url.rpartition("/")[2]
    try:
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=Path(root).expanduser()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.root={root} lacks {name} (md5 {md5}) and it could not be fetched from {url}; "
            f"put the file into that folder, or name with data.root the folder that has it."
        ) from error
