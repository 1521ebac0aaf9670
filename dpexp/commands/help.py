"""`python -m dpexp help [NAME]` says what can be chosen, in the words of the YAML files.

NAME is a configuration group, a value or section of the configuration, or a command; `--config-dir FOLDER` adds groups
of your own.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from dpexp.commands.overrides import COMMANDS, nearest, parsed, roots_of
from dpexp.config import CONF
from dpexp.errors import ConfigError

HEADER = """\
dpexp runs differentially private training experiments declared in YAML.

Choose one option of each group, and override any value:
    python -m dpexp group=conv_fc mechanism=joint privacy.epsilon=8
"""
FOOTER = """\
python -m dpexp help mechanism says what a group's options are and which values they take.
Your own options: put YAML files into ./my/group, ./my/model, … and add --config-dir my.
--cfg job shows the resolved configuration without running it; -m sweep=frontier runs a whole question."""


def help(arguments: Sequence[str]) -> str:
    """The overview, or what there is to say of one name.

    Raises:
        ConfigError: no group, value or command is called that, or several names were given.
    """
    given = parsed(arguments)
    names = [argument for argument in given.overrides if "=" not in argument]
    groups = _groups(roots_of(given))
    if not names:
        return _overview(groups)
    if len(names) > 1:
        raise ConfigError(f"help {' '.join(names)}: one name at a time.")
    known = {command: text for command in COMMANDS if (text := _documented(command))}
    known["version"] = "`python -m dpexp version` says which dpexp this is."
    known |= {name: block.rstrip() for name, block in _values().items()}
    for group, paths in groups.items():
        also = [known[group]] if group in COMMANDS else []
        known[group] = "\n\n".join([*also, *(_option(group, path) for path in paths)])
    if names[0] not in known:
        raise ConfigError(f"help {names[0]}: there is no {names[0]!r}{nearest(names[0], sorted(known))}")
    return known[names[0]]


def _overview(groups: dict[str, list[Path]]) -> str:
    commands = [_documented(command).partition("\n\n")[0] for command in COMMANDS]
    options = [f"{group}: {', '.join(path.stem for path in paths)}" for group, paths in groups.items()]
    return "\n".join([
        HEADER, "== Commands ==", "", *filter(None, commands), "",
        "== Configuration groups (group=option) ==", "", *options, "",
        "== Values (key=value; section.key=value) ==", "", "".join(_values().values()).rstrip(), "", FOOTER,
    ])  # fmt: skip


def _groups(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """The options of each group, by name; of two files of one name the first root's."""
    found: dict[str, dict[str, Path]] = {}
    for root in roots:
        folders = {Path(path) for path in (*root.glob("*/"), *root.glob("hydra/*/"))}
        for folder in sorted(folders):
            for path in folder.glob("*.yaml"):
                found.setdefault(folder.relative_to(root).as_posix(), {}).setdefault(path.stem, path)
    return {group: [options[name] for name in sorted(options)] for group, options in sorted(found.items())}


def _option(group: str, path: Path) -> str:
    """What an option is, and the values that it takes."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    length = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment, rest = lines[:length], lines[length:]
    words = [line.removeprefix("#").strip() for line in comment]
    values = [line for line in rest if not line.startswith("_target_:")]
    default = " (the default)" if _defaults().get(group) == path.stem else ""
    return "\n".join([f"{group}={path.stem}{default}", *(f"    {line}".rstrip() for line in (*words, *values))])


def _defaults() -> dict[str, object]:
    """The option of each group that is chosen if no other is."""
    listed = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    chosen = [pair for entry in listed if isinstance(entry, dict) for pair in entry.items()]
    return {group.removeprefix("override "): option for group, option in chosen}


def _values() -> dict[str, str]:
    """The values and sections of the configuration that are in no group, each as it is written."""
    blocks = re.split(r"^(?=\w)", (CONF / "config.yaml").read_text(), flags=re.MULTILINE)
    named = {block.partition(":")[0]: block for block in blocks[1:]}
    return {name: block for name, block in named.items() if name not in ("defaults", "hydra")}


def _documented(command: str) -> str:
    """What the file of a command says of it, read without importing it."""
    path = Path(__file__).parent / f"{command}.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "") if path.exists() else ""
