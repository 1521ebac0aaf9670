"""Every option that the documentation, the comments of YAML files, docstrings and figures name exists."""

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
from hydra.utils import get_object
from PIL import Image

from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.commands import validate
from dpexp.commands.command_line import COMMANDS, as_audit, check
from dpexp.config import BY_GROUP, CONF, Config
from dpexp.privacy.private_metrics import _KEYS
from dpexp.privacy.sampling.privacy_unit import LocalTraining
from tests.pages import DOCS, FENCED, NOT_JOBS, PAGES, ROOT, TEXTS, blocks, composed, name, prose, text_of

CONFIGURATIONS = [*CONF.rglob("*.yaml"), *(CONF / "sweep").glob("*.yaml")]  # rglob follows no link
ASSIGNED = re.compile(  # group=option, a.b=value
    r"""(?:^|(?<=[\s('"]))\+{0,2}([a-z_]\w*(?:[./]\w+)*)=(?!=)('[^']*'|\{.*\}|\[[^\]]*\]|[^\s'",;)·]*)"""
)
DOTTED = re.compile(r"""(?<![\w./$"-])([a-z_]+(?:\.[A-Za-z_]\w*)+)(?![\w(=/-])""")  # a.b
MAPPING = re.compile(r"\{([^{}]*)\}|^(\w+: [\w.]+)$")  # {a: 1, b: 2}, or a: 1 by itself
OWN = {"conv", "fc", "concentrated", "per_layr"}  # a reader's own groups and classes, and an error
OTHERS = {  # what looks like an option and is none
    "use_cache", "total_length", "microbatch_size", "poisson_sampling", "secure_mode", "create_graph", "padding",
    "bf16", "gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "save_total_limit", "save_strategy", "peft_config", "report_to", "packing", "padding_free", "fp16", "loss_type",
    "auto_find_batch_size", "load_best_model_at_end", "neftune_noise_alpha", "use_liger_kernel",
    "activation_offloading", "make_private_with_epsilon", "max_grad_norm", "DPDataLoader", "DPLSTM",
    "DPMultiheadAttention", "GradSampleModule", "save_checkpoint", "max_steps",
    "options", "norms", "install", "key", "viewStateShareKey", "collate_fn", "__getitems__", "augment.sd",
    "trainer.should_stop", "trainer.train_dataloader.dataset", "tracking.data_budget", "train.user_of",
    *re.findall(r"^    (\w+)=", "\n".join(COMMANDS.values()), re.MULTILINE),
}  # fmt: skip
NAMESPACES = {  # modules and objects, whose attributes are no options
    "args", "datasets", "dpexp", "mlflow", "nn", "os", "p", "package", "peft", "plan", "self", "timm", "torch",
    "transformers", *(path.stem for path in (ROOT / "dpexp").rglob("*.py")),
}  # fmt: skip
# Endings of files.
ENDINGS = (".csv", ".json", ".jsonl", ".md", ".patch", ".png", ".py", ".safetensors", ".toml", ".txt", ".yaml")


@cache
def schema():
    """The dotted names that a configuration may have, with * for any name, and the options of each group."""
    names = set()
    options = {
        "calibrate": {*CALIBRATABLE},
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
    for file in CONFIGURATIONS:
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
        "data": {
            "test_hash": dict.fromkeys(("column", "fraction")), "part": dict.fromkeys(("column", "low", "high")),
        },
        "group": {"groups": {"*": dict.fromkeys(("layers", "parameters", "rest"))}},
        **{section: {"by_group": {"*": dict.fromkeys(("_target_", "value", "gamma"))}, "initial": any_name,
                     "value": any_name} for section in BY_GROUP},
        "allocation": dict.fromkeys(("weights", "sigma", "sigma_of_average"), any_name),
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
    if command and command[1] in NOT_JOBS:
        return
    is_call = "(" in code.partition("=")[0] and not code.startswith(" ")  # of a function: no options
    for key, value in [] if is_call else ASSIGNED.findall(code):
        value = value.strip("'")
        if key in options and re.fullmatch(r"[\[\]\w,]+", value):
            chosen = {*re.findall(r"\w+", value.lower())} - options[key] - own - OWN
            yield from (f"{key}={option}" for option in chosen)
        elif not known(key):
            yield key
        elif value.startswith("{") and key not in OTHERS:
            yield from unknown_within(known(key), yaml.safe_load(value.replace("…", "…: 1")))
    sections = {one.partition(".")[0] for one in names}
    for option in DOTTED.findall(code):
        head = option.partition(".")[0]
        is_option = head in sections or (option == code and head not in NAMESPACES)
        if is_option and not option.endswith(ENDINGS) and not known(option):
            yield option
    for inner, single in MAPPING.findall(code):
        for key in re.findall(r"(?:^|, )([A-Za-z_]\w*):", inner or single):
            if not known(key) and key not in OWN and not key.startswith("test_"):
                yield key


def unknown_within(name, value):
    for key, inner in value.items() if isinstance(value, dict) else ():
        if place := known(f"{name}.{key if isinstance(key, str) else '*'}"):
            yield from unknown_within(place, inner)
        else:
            yield f"{name}.{key}"


def codes(path):
    """What a text has as code: of a page inline code, commands and outputs, of YAML and Python blocks the comments."""
    text = text_of(path)
    if path.suffix in (".md", ".ipynb"):
        for language, _, content in FENCED.findall(text):
            yield from comments(content) if language in ("yaml", "python", "py", "diff") else content.splitlines()
    if path.suffix == ".yaml":
        return (yield from comments(text))
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text)):
        yield " ".join(code.split())


def comments(text):
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


OF_OLD = ("CHANGELOG.md", "upgrade.md")  # say what options were called before
WITH_OPTIONS = [*(path for path in TEXTS if path.name not in OF_OLD), *CONFIGURATIONS, *(ROOT / "dpexp").rglob("*.py")]


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
    for table in re.findall(r"(?:^\|.*\n){3,}", prose(page), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
        for column, of in enumerate(head):
            of_column = keys_of(of.strip("`")) if of.startswith("`") else set()
            allowed = of_column or (anything if column == 0 else set())
            assert not re.fullmatch(r"`\w+`", of) or known(of.strip("`")), of
            for cell in (row[column] for row in rows) if allowed else ():
                named = re.findall(r"`(\w+)`", cell.partition("(")[0]) if re.match(r"`\w+`", cell) else []
                assert {*named} <= allowed, (of, cell)


@pytest.mark.parametrize("figure", sorted(DOCS.glob("*.png")), ids=name)
def test_a_figure_says_what_draws_it(figure, monkeypatch):
    """Its file has the commands and the words of the figure: what an option was called when it was drawn."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    commands, _, words = Image.open(figure).text.get("Description", "").partition("\n\n")
    assert commands.splitlines() == import_module("figures").COMMANDS[figure.name], "redraw it: benchmarks/figures.py"
    assert [option for line in words.splitlines() for option in unknown(line)] == []
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        if program == "dpexp":
            check(as_audit(arguments[1:]) if arguments[0] == "audit" else arguments)
            swept = re.compile("^-m$|^audit$|range|,(?![^{]*})")  # one trial is composed, without these
            validate.check(composed([one for one in arguments if not swept.search(one)]))
        else:
            assert (ROOT / program).exists()
