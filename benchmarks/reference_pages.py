"""Writes docs/options.md and docs/commands.md from the YAML of the configuration, its schema, and the commands' help.

    python benchmarks/reference_pages.py

Texts are those that `python -m dpexp help` prints: comments in conf/. A key without a comment has that of its class.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.utils import get_object
from report import DOCS, row, table

from dpexp.accounting.coverage import yaml_name
from dpexp.accounting.sampling import POLICIES
from dpexp.commands.command_line import COMMANDS, NO_OPTIONS, _options_of_groups, group_descriptions
from dpexp.config import CONF, Config

PER_RECORD = ("experiment", "sweep", "hydra/launcher")  # options are whole settings, so that keys are not listed
NAMED = ("callbacks.", "preprocessing.")  # sections of which there may be several
MOST_DEFAULTS, MOST_OWNERS = 3, 6  # that a cell lists
_SECTIONS = "|".join(field.name for field in fields(Config))
_NAMES = "|".join(COMMANDS)
_WORD = rf"(?:{_NAMES})\b|--?\w[\w-]*|[A-Z]{{2,}}(?:\.\w+)?\b|[+~]?[\w./]+=[^\s;,)]*[^\s;,).]"  # of a command
_CODES = (  # what a comment has as code
    r"`[^`]+`", r"'[\w.]+=[^']*'", r"[\w.]+='[^']*'", rf"python (?:-m dpexp|[\w/]+\.py)(?: (?:{_WORD}))*",
    r"pip install '[^']*'",
    r"(?<![\w./])(?:\+?[\w./]+=[\w.\[\],…:/-]*[\w\]…]", r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", r"\[[\w-][^\]()]*\](?!\()",
    r"[\w.]*_target_", r"\$\{\w+\}", rf"(?:{_SECTIONS})\.\w+(?:\.\w+)*", r"[a-z]{2,}(?:_[a-z]+)+)",
)  # fmt: skip
CODE = re.compile("|".join(_CODES))
KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>.*?)(?:  +# ?(?P<comment>.*))?$")
INTRODUCTION = """\
# Options

A job takes one option of each group, as `data=mnist`, and values, as `privacy.epsilon=8`, in any order:
`python -m dpexp data=mnist privacy.epsilon=8 optimizer.lr=0.5`. What most jobs set:

| to choose | give |
|---|---|
| data and model | [`data`](#data), [`model`](#model), or a whole [`experiment`](#experiment) |
| the guarantee | `privacy.epsilon` and `privacy.delta` ([privacy](#privacy)); [`privacy_unit`](#privacy_unit) |
| samples | `sampling.expected_batch_size`; `sampling.epochs` or `sampling.steps` ([sampling](#sampling)) |
| clipping | `clip_norm.value` ([clip_norm](#clip_norm)); [`group`](#group) |
| steps | `optimizer.lr` ([optimizer](#optimizer)); [`scheduler`](#scheduler) |
| several jobs | `-m` and values with commas, or a [`sweep`](#sweep) |

`--cfg job` shows the whole configuration without running it, and `python -m dpexp help NAME` prints what this page says
of a group or value. Further options are your own: [Custom models, data and groups](own.md).

A default in *italics* is computed from other values; `???` must be given.
"""
COMMANDS_PAGE = """\
# Commands

Each begins with `python -m dpexp`, or `dpexp` where it is installed; `python -m dpexp help NAME` says more. Without a
name, it is a job: `python -m dpexp [FLAG ...] [GROUP=OPTION ...] [KEY=VALUE ...]` trains with these
[options](options.md).

- `-m`: a sweep of all combinations of values that are separated by commas
- `--config-dir FOLDER`: a folder with options of your own
- `--cfg job`: shows the resolved configuration

A RUN is a job's folder, or an MLflow run id of the store `uri=…`, by default `sqlite:///outputs/mlflow.db`. A SOURCE
may also be a ledger file.
"""
OF_ALL = "the store that has the run"  # said once, above


def options_page() -> str:
    groups, decided = _options_of_groups([CONF]), sorted(group_descriptions().items())
    rows = []
    for group, text in decided:
        options = ", ".join(f"`{path.stem}`" for path in groups.get(group, []))
        rows.append((f"[`{group}`](#{anchor(group)})", options, marked(text)))
    parts = [INTRODUCTION, "## Groups", table(("group", "options", "what it decides"), rows), *values()]
    for group, text in decided:
        parts.append(f"## {group}\n\n{marked(text)}")
        parts += of_group(group, groups[group]) if group in groups else ()
    return joined(parts)


def joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts) + "\n"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def marked(text: str) -> str:
    """A comment as Markdown, with what is code in it as code."""
    parts, last = [], 0
    for match in CODE.finditer(text):
        parts += [escaped(text[last : match.start()]), f"`{match[0].strip('`')}`"]
        last = match.end()
    return cell("".join([*parts, escaped(text[last:])]))


def escaped(text: str) -> str:
    return re.sub(r"([*_\[\]<>])", r"\\\1", text)


def values() -> Iterator[str]:
    """Tables of the values that belong to no group."""
    content, comments = of_jobs()
    tops = {key: value for key, value in content.items() if not isinstance(value, dict) or key == "schedule"}
    yield "## Values of their own"
    yield keys_table(Key(key, [(None, tops[key])], comments) for key in tops if key not in NO_OPTIONS)
    for section in ("privacy", "checkpoint"):
        yield f"## {section}"
        yield keys_table(Key(f"{section}.{key}", [(None, one)], comments) for key, one in content[section].items())


def of_jobs() -> tuple[dict[str, Any], dict[str, str]]:
    """The values of conf/config.yaml, and their comments."""
    text = (CONF / "config.yaml").read_text().partition("\n\n")[2].partition("\nhydra:")[0]
    return yaml.safe_load(text), comments_of(text)


def of_group(group: str, paths: list[Path]) -> Iterator[str]:
    """A table of the group's options, and one of the keys that they have."""
    default = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    rows = []
    for path in paths:
        is_default = {group: path.stem} in default or {f"override {group}": path.stem} in default
        first = " ".join(line.removeprefix("#").strip() for line in leading(path.read_text()))
        rows.append((f"`{path.stem}` (default)" if is_default else f"`{path.stem}`", marked(first)))
    yield "\n".join([f"| `{group}` | |", "|---|---|", *(row(*cells) for cells in rows)])
    if group not in PER_RECORD:
        keys = keys_of(group, paths)
        if keys:
            yield keys_table(keys)
    if group == "sampling":
        yield claims()


def keys_of(group: str, paths: list[Path]) -> list["Key"]:
    section = group.replace("/", ".")
    found: dict[str, list[tuple[Any, Any]]] = {}  # key -> (option, default)
    comments: dict[str, Any] = {}  # key -> option -> comment
    targets: dict[str, list[str]] = {}
    for path in paths:
        text = path.read_text()
        is_global = "@package _global_" in text
        content, prefix = yaml.safe_load(text) or {}, "" if is_global else f"{section}."
        for key, value in flat(content if is_global else {section: content}, targets):
            if key.startswith(f"{section}.") or not is_global:
                found.setdefault(key, []).append((path.stem, value))
        for key, comment in comments_of(text).items():
            comments.setdefault(f"{prefix}{key}", {})[path.stem] = comment
    if group == "data":
        content, of_all = of_jobs()
        comments |= {key: {"": comment} for key, comment in of_all.items()}
        found |= {f"data.{key}": [(None, value)] for key, value in content["data"].items()}
    return [Key(key, defaults, comments, len(paths), targets) for key, defaults in found.items()]


def claims() -> str:
    """Which accountant has a bound for which sampling policy and adjacency."""
    rows = []
    for name, policy in POLICIES.items():
        together: dict[tuple[str, ...], list[str]] = {}
        for adjacency, names in policy.covers.items():
            together.setdefault(names, []).append(f"`{adjacency}`")
        for names, adjacencies in together.items():
            bounds = ", ".join(f"`{accountant}`" for accountant in names)
            rows.append((f"`{yaml_name(name)}`", ", ".join(adjacencies), bounds))
    said = "The first adjacency of a policy is its default. `accountant=all` takes every accountant of the row."
    return f"{said}\n\n{table(('`sampling`', '`privacy.adjacency`', '`accountant`'), rows)}"


def leading(text: str) -> list[str]:
    """The comment that a file begins with."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    length = next((k for k, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:length]


def flat(content: Any, targets: dict[str, list[str]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of what a user may set; notes the classes of sections."""
    for key, value in content.items():
        name = f"{prefix}.{key}" if prefix else key
        if key in ("_target_", "defaults", "module") and prefix.count(".") < 1:
            if key == "_target_" and value:
                targets.setdefault(prefix, []).append(value)
            elif key == "module":
                own = {of: one for of, one in value.items() if of != "_target_" and "${" not in str(one)}
                yield from flat(own, targets, name) if own and "subset" in own else ()
        elif key == "_target_":
            targets.setdefault(prefix, []).append(value)
        elif isinstance(value, dict) and ("." not in name.removeprefix("hydra.") or name.startswith(NAMED)):
            yield from flat(value, targets, name)
        else:
            yield name, value


def comments_of(text: str) -> dict[str, str]:
    """dotted key -> its comment, with the lines that continue it."""
    found: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := KEY.match(line):
            depth = len(match["indent"])
            stack = [(at, key) for at, key in stack if at < depth] + [(depth, match["key"])]
            if match["comment"]:
                found[".".join(key for _, key in stack)] = match["comment"].strip()
        elif (more := re.match(r"^ +# ?(.*)", line)) and stack and (last := ".".join(key for _, key in stack)) in found:
            found[last] += f" {more[1].strip()}"
    return found


@dataclass
class Key:
    """What a user may set.

    Args:
        defaults: (option, default) of each option of a group; option None: of none.
        comments: of this key and others: a text, or one for each option.
        options: how many the group has; targets: the classes of sections.
    """

    key: str
    defaults: list[tuple[Any, Any]]
    comments: dict[str, Any]
    options: int = 0
    targets: dict[str, list[str]] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """Key, type, default, and what its comments say."""
        meaning = marked("; ".join(self.meanings()))
        return f"`{self.key}`", cell(type_of(self.key, self.targets)), default_of(self.defaults), meaning

    def meanings(self) -> Iterator[str]:
        """Of some options alone with their names."""
        found = self.comments.get(self.key) or documented(self.key, self.targets)
        found = found if isinstance(found, dict) else {"": found}
        owners = [option for option, _ in self.defaults if option]
        texts: dict[str, list[str]] = {}
        for option, text in found.items():
            texts.setdefault(text, []).append(option)
        general = next(iter(texts)) if len(texts) == 1 or {*owners} - {*found} else None
        if general is not None:
            texts[general] = owners
        for text, of in texts.items():
            is_of_all = len(of) >= self.options or len(of) > MOST_OWNERS or not any(of)
            is_unnamed = is_of_all or (text == general and len(texts) > 1)
            yield text if is_unnamed else f"{', '.join(f'`{one}`' for one in of)}: {text}"


def keys_table(keys: Iterable[Key]) -> str:
    return table(("key", "type", "default", "meaning"), (key.cells() for key in keys))


def default_of(defaults: list[tuple[Any, Any]]) -> str:
    shown: dict[str, list[str]] = {}
    for option, value in defaults:
        shown.setdefault(one_default(value), []).append(f"`{option}`")
    if len(shown) == 1:
        return next(iter(shown))
    if len(shown) > MOST_DEFAULTS:
        return "*by option*"
    ordered = sorted(shown.items(), key=lambda item: -len(item[1]))
    return "; ".join([ordered[0][0], *(f"{value} ({', '.join(of)})" for value, of in ordered[1:])])


def one_default(value: Any) -> str:
    text = str(value).replace("${cwd:}", ".")
    if reference := re.fullmatch(r"\$\{(\w[\w.]*)\}", text):
        return f"*`{reference[1]}`*"
    if "${" in text:
        return "*computed*"
    if isinstance(value, bool | list | dict) or value is None:
        text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
        text = text.removesuffix("\n...\n").strip().replace("'", "")
    return f"`{cell(text)}`"


def type_of(key: str, targets: dict[str, list[str]]) -> str:
    """The type in the schema, or in the signature of the section's class; empty if neither says one."""
    kind: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        of = hints(kind).get(section)
        kind = next((one for one in (of, *get_args(of)) if is_dataclass(one)), None)
        if kind is None:
            break
    found = hints(kind).get(name, Any) if kind else Any
    for target in targets.get(".".join(sections), ()):
        if found is Any and target.startswith("dpexp."):  # others' types differ between their versions
            found = hints(object_of(target)).get(name, Any)
    if found is Any or is_dataclass(found):
        return ""
    if get_origin(found) is Union:  # of an annotation with a range; written as others are
        found = reduce(or_, get_args(found))
    return f"`{re.sub(r'[a-z_]+[.]', '', inspect.formatannotation(found))}`"


def object_of(target: str | None) -> Any:
    """The class or function of a `_target_`; None if it is of a package that may not be installed."""
    known = ("dpexp.", "torch.", "pytorch_lightning.")
    return get_object(target) if target and target.startswith(known) else None


def hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind if not inspect.isclass(kind) or is_dataclass(kind) else kind.__init__)
    except (NameError, TypeError, AttributeError):
        return {}


def documented(key: str, targets: dict[str, list[str]]) -> str:
    """What the docstring of the section's first class says of an argument."""
    *sections, name = key.split(".")
    kind: Any = object_of(next(iter(targets.get(".".join(sections), ())), None))
    if kind is None and len(sections) == 1:
        kind = next((f.type for f in fields(Config) if f.name == sections[0]), None)
    lines = (inspect.getdoc(kind) or "") if kind else ""
    match = re.search(rf"^    {name}: (.*(?:\n      .*)*)", lines, re.MULTILINE)
    text = " ".join(match[1].split()) if match else ""
    return text[:1].upper() + text[1:] if text else ""


def commands_page() -> str:
    """What each command does, and its options; `help NAME` has the paragraphs between."""
    parts = [COMMANDS_PAGE]
    for name, text in COMMANDS.items():
        usage, *lines = text.splitlines()
        parts.append(f"## {name}\n\n{usage.replace('`python -m dpexp ', '`', 1)}")
        options = [found.groups() for line in lines if (found := re.match(r"^    (\S+)\s{2,}(.*)$", line))]
        parts.append("\n".join(f"- `{key}`: {marked(of)}" for key, of in options if of != OF_ALL))
    return joined([part for part in parts if part])


PAGES = {"options.md": options_page, "commands.md": commands_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
