"""The documentation's Python runs as printed, its commands and options are understood, and its links lead somewhere."""

import inspect
import re
import shlex
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import pytorch_lightning as pl
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_object

from dpexp import config
from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.accounting.ledger import read_ledger
from dpexp.commands import command_line, validate
from dpexp.commands.command_line import as_audit, check
from dpexp.config import CONF, Config
from dpexp.privacy.gradients.layer_rules import RULES
from dpexp.privacy.private_metrics import _KEYS, metric_releases
from dpexp.privacy.sampling.privacy_unit import LocalTraining

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
FENCED = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = ("account", "evaluate", "help", "predict", "resume", "schema")


def blocks(page, *languages):
    """(title, content) of a page's code blocks."""
    return [(title, content) for language, title, content in FENCED.findall(page.read_text()) if language in languages]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Goes to an empty folder, with the files that a page shows under their titles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(page):
        for title, content in blocks(page, "yaml", "python"):
            if title:
                Path(title).parent.mkdir(parents=True, exist_ok=True)
                Path(title).write_text(content)

    return write


@pytest.fixture
def rules():
    """A rule that a page registers is forgotten."""
    known = dict(RULES)
    yield
    RULES.clear()
    RULES.update(known)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page, written, rules, tmp_path, dpexp_job):
    """A page's blocks one after the other, in one namespace."""
    written(page)
    if page.name == "own_loop.md":
        written(DOCS / "own.md")
    if page.name == "models.md":
        dpexp_job("model=logistic", "sampling.steps=2", "tracking=none").rename("trained")
    namespace = {"__name__": "page"}
    for title, content in blocks(page, "python"):
        if not title:
            exec(compile(content, name(page), "exec"), namespace)
    if page.name == "own_loop.md":
        rounds = [len(read_ledger(tmp_path / name)) for name in ("ledger.jsonl", "loop.jsonl", "adapter/ledger.jsonl")]
        assert rounds == [50, 50, 20]


def commands(page):
    """The arguments of each `python -m dpexp …` line."""
    for _, content in blocks(page, "sh"):
        for line in content.splitlines():
            _, found, arguments = line.partition("python -m dpexp")
            if found:
                yield shlex.split(arguments, comments=True)


@pytest.mark.parametrize("page", [page for page in TEXTS if any(commands(page))], ids=name)
def test_commands_are_understood(page, written):
    written(page)
    for arguments in commands(page):
        if arguments and arguments[0] in COMMANDS:
            keys = [argument.partition("=")[0] for argument in arguments if "=" in argument]
            assert all(f"{key}=" in command_line.COMMANDS[arguments[0]] for key in keys), arguments
            continue
        if arguments and arguments[0] == "audit":
            arguments = as_audit(arguments[1:])
        check(arguments)
        overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
        if "-m" not in arguments and not any(override.startswith("data.path=") for override in overrides):
            if "--config-dir" in arguments:
                folder = Path.cwd() / arguments[arguments.index("--config-dir") + 1]
                overrides.append(f"hydra.searchpath=[file://{folder}]")
            cfg = composed(overrides)
            validate.check(cfg)
            metric_releases(cfg.private_metrics.release or {})


def composed(overrides):
    config.register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        return compose("config", overrides)


def test_ones_own_model_data_and_groups_train(written, dpexp_job):
    written(DOCS / "own.md")
    arguments, _ = commands(DOCS / "own.md")
    output = dpexp_job(*arguments, "sampling.steps=3", "tracking=none")
    (spec,) = read_ledger(output / "ledger.jsonl").rounds
    assert [query.group for query in spec.queries] == ["norms", "head", "body"]


@pytest.mark.parametrize("k", range(6))
def test_every_extension_of_ones_own_trains(k, written, rules, dpexp_job):
    """Each recipe is one Python file and one YAML file outside the package."""
    page = DOCS / "extending.md"
    written(page)
    recipes = [*commands(page)]
    assert len(recipes) == 6 == len([title for title, _ in blocks(page, "python") if title])
    length = () if "sampling=in_order" in recipes[k] else ("sampling.steps=2",)
    output = dpexp_job(*recipes[k], *length, "tracking=none")
    assert len(read_ledger(output / "ledger.jsonl")) == (9 if "sampling=in_order" in recipes[k] else 2)


def anchors(path):
    """Those that a page's headings make, as Markdown renderers do."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_relative_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target
        if page in PAGES:
            assert (page.parent / path).absolute().is_relative_to(DOCS), f"{target} leaves the site"
    for included, _, section in re.findall(r'^--8<-- "([\w.]+)(:(\w+))?"', text, re.M):
        assert not section or f"--8<-- [start:{section}]" in (ROOT / included).read_text()


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_references_name_what_exists(page):
    text = page.read_text()
    for path in re.findall(r"\]\[([\w.]+)\]|^::: ([\w.]+)", FENCED.sub("", text), re.M):
        assert found("".join(path)), path


def found(path):
    """Whether a dotted path leads to a module, or to what is in one."""
    parts = path.split(".")
    for k in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def test_every_page_is_in_the_navigation():
    listed = [*leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def leaves(nav):
    for entry in nav:
        for under in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [under] if isinstance(under, str) else leaves(under)


def test_readmes_table_names_every_option():
    conf = ROOT / "conf"
    table = (ROOT / "README.md").read_text().partition("## Configuration")[2].partition("## ")[0]
    for folder in sorted({path.parent for path in conf.glob("**/*.yaml")} - {conf}):
        group = folder.relative_to(conf).as_posix()
        (row,) = re.findall(rf"^\| `{group}` \| (.*?) \|", table, re.MULTILINE)
        options, named = {path.stem for path in folder.glob("*.yaml")}, set(re.findall(r"`(\w+)`", row))
        assert options <= named if group.startswith("hydra/") else options == named, group  # Hydra brings some


RESULT = re.compile(r"^\| (\w+) \| .* % \| ([\d.]+) \| [-e\d.]+ \| \d+ \| [\d.]+ \| `([^`]+)` \|", re.MULTILINE)


def test_every_result_has_a_command_and_costs_no_more_than_its_target(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rows = RESULT.findall((DOCS / "results.md").read_text())
    assert {experiment for experiment, *_ in rows} == {*import_module("results").ROWS}
    for _, epsilon, command in rows:
        assert float(epsilon) <= composed(command.split()).privacy.epsilon


ASSIGNED = re.compile(  # group=option, a.b=value
    r"""(?:^|(?<=[\s('"]))\+{0,2}([a-z_]\w*(?:[./]\w+)*)=(?!=)('[^']*'|\{.*\}|\[[^\]]*\]|[^\s'",;)·]*)"""
)
DOTTED = re.compile(r"""(?<![\w./$"-])([a-z_]+(?:\.[A-Za-z_]\w*)+)(?![\w(=/-])""")  # a.b
MAPPING = re.compile(r"\{([^{}]*)\}|^(\w+: [\w.]+)$")  # {a: 1, b: 2}, or a: 1 by itself
OWN = {"conv", "fc", "concentrated", "per_layr"}  # a reader's own groups and classes, and an error
OTHERS = {  # what looks like an option and is none
    "use_cache", "total_length", "microbatch_size", "poisson_sampling", "secure_mode", "create_graph", "padding",
    "options", "install", "key", "viewStateShareKey", "test_loss", "collate_fn", "__getitems__", "augment.sd",
    "trainer.should_stop", "trainer.train_dataloader.dataset", "tracking.data_budget", "train.user_of",
    *re.findall(r"^    (\w+)=", "\n".join(command_line.COMMANDS.values()), re.MULTILINE),
}  # fmt: skip
NAMESPACES = {  # modules and objects, whose attributes are no options
    "args", "datasets", "dpexp", "mlflow", "nn", "os", "p", "package", "peft", "plan", "self", "timm", "torch",
    "transformers", *(path.stem for path in (ROOT / "dpexp").rglob("*.py")),
}  # fmt: skip


@cache
def schema():
    """The dotted names that a configuration may have, with * for any name, and the options of each group."""
    names = set()
    options = {
        "calibrate": {*CALIBRATABLE}, "accountant": {"gdp"},
        "hydra/sweeper": {"optuna"}, "hydra/launcher": {"basic", "joblib", "submitit_local", "submitit_slurm", "ray"},
    }  # fmt: skip

    def add(path, content):
        for key, inner in content.items():
            names.add(name := f"{path}.{key}".lstrip("."))
            if isinstance(inner, dict):
                add(name, inner)
        if (target := content.get("_target_")) and not target.startswith("hydra_plugins"):
            add(path, dict.fromkeys(inspect.signature(get_object(target)).parameters))

    add("", of_dataclass(Config))
    for file in [*CONF.rglob("*.yaml"), *(CONF / "sweep").glob("*.yaml")]:
        group, text = file.parent.relative_to(CONF).as_posix(), file.read_text()
        content = {key: inner for key, inner in (yaml.safe_load(text) or {}).items() if key != "defaults"}
        options.setdefault(group, {"null"}).add(file.stem)
        add("" if group == "." or "@package _global_" in text else group.replace("/", "."), content)
    any_name = {"*": None}
    of_metric = {**dict.fromkeys(_KEYS), "values": {"*": {"alpha": None, "dim": None}}}
    add("", {  # what is in values that the schema takes as a whole
        "private_metrics": {"release": {"*": of_metric}}, "callbacks": {"*": {"_target_": None}},
        "privacy_unit": {"local_training": of_dataclass(LocalTraining)},
        "privacy": {"budget": dict.fromkeys(("epsilon", "delta", "order")), "max_tpr_at_fpr": any_name},
        "schedule": {key: {"linear": None, "step": any_name} for key in "zqS"},
        "data": {"test_hash": dict.fromkeys(("column", "fraction"))},
        "group": {"groups": {"*": dict.fromkeys(("layers", "parameters", "rest"))}},
        "clip_norm": {"initial": any_name}, "allocation": {"weights": any_name, "sigma": any_name},
        "trainer": dict.fromkeys((*inspect.signature(pl.Trainer).parameters, *dir(pl.Trainer))),
    })  # fmt: skip
    return names, options


def of_dataclass(kind):
    """The fields of a dataclass, with those of the dataclasses in it."""
    inner = {
        field: [one for one in (of, *get_args(of)) if is_dataclass(one)] for field, of in get_type_hints(kind).items()
    }
    return {field: of_dataclass(kinds[0]) if kinds else None for field, kinds in inner.items()}


def known(name):
    """A name's place in the schema; empty if it has none. Without a dot it may also be the last part of an option."""
    names, options = schema()
    places = [name, re.sub(r"[^.]+$", "*", name), re.sub(r"[^.]+(\.[^.]+)$", r"*\1", name)]
    if name in options or name in OTHERS or name.partition(".")[0] == "hydra":
        return name
    if "." not in name and any(one.endswith(f".{name}") for one in names):
        return name
    return next((place for place in places if place in names), "")


def keys_of(name):
    """The options of a group, or what a value has within it."""
    names, options = schema()
    inner = {one.removeprefix(f"{name}.").partition(".")[0] for one in names if one.startswith(f"{name}.")}
    return options.get(name) or (keys_of(f"{name}.*") if "*" in inner else inner)


def unknown(code, own=frozenset()):
    """The options that a piece of code names and nothing has; `own`: options of the reader's own, of any group."""
    names, options = schema()
    command = re.search(r"python -m dpexp (\w+)", code)
    if command and command[1] in COMMANDS:
        return
    is_call = "(" in code.partition("=")[0] and not code.startswith(" ")  # of a function: no options
    for key, value in [] if is_call else ASSIGNED.findall(code):
        value = value.strip("'")
        if key in options and re.fullmatch(r"[\[\]\w,]+", value):
            chosen = {*re.findall(r"\w+", value)} - options[key] - own - OWN
            yield from (f"{key}={option}" for option in chosen)
        elif not known(key):
            yield key
        elif value.startswith("{") and key not in OTHERS:
            yield from unknown_within(known(key), yaml.safe_load(value.replace("…", "…: 1") if "…" in value else value))
    sections = {name.partition(".")[0] for name in names}
    for name in DOTTED.findall(code):
        head = name.partition(".")[0]
        is_option = head in sections or (name == code and head not in NAMESPACES)
        if (
            is_option
            and not known(name)
            and not re.search(r"\.(csv|jsonl?|md|patch|png|py|safetensors|txt|yaml)$", name)
        ):
            yield name
    for inner, single in MAPPING.findall(code):
        for key in re.findall(r"(?:^|, )([A-Za-z_]\w*):", inner or single):
            if not known(key) and key not in OWN:
                yield key


def unknown_within(name, value):
    for key, inner in value.items() if isinstance(value, dict) else ():
        if place := known(f"{name}.{key if isinstance(key, str) else '*'}"):
            yield from unknown_within(place, inner)
        else:
            yield f"{name}.{key}"


def codes(path):
    """What a text has as code: of a page inline code, commands and outputs, of YAML and Python blocks the comments."""
    text = path.read_text()
    if path.suffix == ".md":
        for language, _, content in FENCED.findall(text):
            yield from comments(content) if language in ("yaml", "python", "py") else content.splitlines()
    if path.suffix == ".yaml":
        return (yield from comments(text))
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text)):
        yield " ".join(code.split())


def comments(text):
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


WITH_OPTIONS = [
    *TEXTS,
    *sorted(CONF.rglob("*.yaml")),
    *(CONF / "sweep").glob("*.yaml"),
    *(ROOT / "dpexp").rglob("*.py"),
]


def test_every_option_that_a_text_names_exists():
    found = []
    for path in WITH_OPTIONS:
        own = {Path(title).stem for title, _ in blocks(path, "yaml")} if path in PAGES else set()
        found += [(name(path), option) for code in codes(path) for option in unknown(code, own)]
    assert found == []


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_every_option_in_a_table_exists(page):
    """A column headed by a group has its options, one headed by a value what is within it; other first columns names
    that some option has."""
    names, options = schema()
    anything = {one.rpartition(".")[2] for one in names}.union(options, *options.values(), OTHERS)
    for table in re.findall(r"(?:^\|.*\n){3,}", FENCED.sub("", page.read_text()), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
        for column, of in enumerate(head):
            allowed = keys_of(of.strip("`")) if of.startswith("`") else set()
            allowed |= anything if column == 0 and not allowed else set()
            assert not re.fullmatch(r"`\w+`", of) or known(of.strip("`")), of
            for cell in (row[column] for row in rows) if allowed else ():
                named = re.findall(r"`(\w+)`", cell.partition("(")[0]) if re.match(r"`\w+`", cell) else []
                assert {*named} <= {*allowed}, (of, cell)
