"""`python -m dpexp help`: commands, configuration groups and values, with the comments of the YAML files."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from dpexp.commands.arguments import COMMANDS
from dpexp.commands.overrides import INTERNAL, nearest, parsed, roots_of
from dpexp.config import CONF
from dpexp.errors import ConfigError

HEADER = """\
dpexp runs differentially private training experiments declared in YAML.

Choose one option of each group, and override any value:
    python -m dpexp group=conv_fc mechanism=joint privacy.epsilon=8
"""
FOOTER = """\
python -m dpexp help mechanism lists a group's options and their values.
Your own options: put YAML files into ./my/group, ./my/model, … and add --config-dir my.
--cfg job shows the resolved configuration without running it; -m sweep=frontier runs a predefined sweep."""


def help(arguments: Sequence[str]) -> str:
    """The overview, or the description of one name.

    Raises:
        ConfigError: no group, value or command is called that, or several names were given.
    """
    namespace = parsed(arguments)
    names = [argument for argument in namespace.overrides if "=" not in argument]
    groups = _groups(roots_of(namespace))
    if not names:
        return _overview(groups)
    if len(names) > 1:
        raise ConfigError(f"help {' '.join(names)}: one name at a time.")
    known = COMMANDS | {name: block.rstrip() for name, block in _values().items()}
    for group, paths in groups.items():
        command = [COMMANDS[group]] if group in COMMANDS else []
        known[group] = "\n\n".join([*command, *(_option(group, path) for path in paths)])
    if names[0] not in known:
        raise ConfigError(f"help {names[0]}: there is no {names[0]!r}{nearest(names[0], sorted(known))}")
    return known[names[0]]


def _overview(groups: dict[str, list[Path]]) -> str:
    commands = [usage.partition("\n")[0] for usage in COMMANDS.values()]
    options = [f"{group}: {', '.join(path.stem for path in paths)}" for group, paths in groups.items()]
    return "\n".join([
        HEADER, "== Commands ==", "", *commands, "",
        "== Configuration groups (group=option) ==", "", *options, "",
        "== Values (key=value; section.key=value) ==", "", "".join(_values().values()).rstrip(), "", FOOTER,
    ])  # fmt: skip


def _groups(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """group -> its options' files, sorted by name; of two files of the same name, the first root's."""
    found: dict[str, dict[str, Path]] = {}
    for root in roots:
        folders = {Path(path) for path in (*root.glob("*/"), *root.glob("hydra/*/"))}
        for folder in sorted(folders):
            for path in folder.glob("*.yaml"):
                found.setdefault(folder.relative_to(root).as_posix(), {}).setdefault(path.stem, path)
    return {group: [options[name] for name in sorted(options)] for group, options in sorted(found.items())}


def _option(group: str, path: Path) -> str:
    """An option's first comment, and its values."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("# @package", "_target_:"))]
    default = " (the default)" if _defaults().get(group) == path.stem else ""
    length = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    shown = [line.removeprefix("#").strip() for line in lines[:length]] + lines[length:]
    return "\n".join([f"{group}={path.stem}{default}", *(f"    {line}".rstrip() for line in shown)])


def _defaults() -> dict[str, object]:
    """group -> its default option."""
    listed = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    pairs = [pair for entry in listed if isinstance(entry, dict) for pair in entry.items()]
    return {group.removeprefix("override "): option for group, option in pairs}


def _values() -> dict[str, str]:
    """name -> text of the values and sections of config.yaml that belong to no group and are not internal."""
    blocks = re.split(r"^(?=\w)", (CONF / "config.yaml").read_text(), flags=re.MULTILINE)
    named = {block.partition(":")[0]: block for block in blocks[1:]}
    return {name: block for name, block in named.items() if name not in ("defaults", "hydra", *INTERNAL)}
