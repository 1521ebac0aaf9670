"""What a command line may say: the commands, `help`, and checks of overrides before Hydra sees them.

Hydra's own messages take several lines, and advise to add a misspelt group as a new one. Imports nothing slow.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dpexp import config
from dpexp._hydra_compat import get_args_parser
from dpexp.commands.validate import REFUSED
from dpexp.config import CONF, Config
from dpexp.errors import ConfigError

# command -> what `python -m dpexp help` prints
COMMANDS = {
    "account": """\
`python -m dpexp account SOURCE [SOURCE ...]` computes the privacy cost of ledgers, composed if there are several.

A SOURCE is a ledger file, a job's output folder or an MLflow run id. Several count as runs on the same data.
With data.id=NAME: what all runs on that data set have spent, and how much of a budget remains; SOURCES are then further
ledgers or folders.

    accountant=pld    or rdp, moments, strong, basic; several as pld,rdp; or all
    delta=1e-5        default: the run's own
    epsilon=1         also print the δ at this ε
    adjacency=…       add_remove, replace_one or replace_null; default: the ledger's own
    budget=…          with data.id: another budget than that of the runs
    figure=F.png      draw ε(δ), and the errors of a membership test
    uri=…             the MLflow store, with data.id several; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db""",
    "audit": """\
`python -m dpexp audit [OVERRIDE ...]` attacks a job's plan, and compares what it finds with what is claimed.

It takes the overrides of a job: `audit group=conv_fc mechanism=joint sampling=fixed_size`. Canaries whose gradients
have a coordinate each are put into the data; callback, Trainer, sampler, noise and ledger are the job's. The exit
status is not 0 if a claim is refuted. An audit can refute a claim, and never proves one. A job with audit=dirac trains
first.""",
    "certificate": """\
`python -m dpexp certificate RUN` states what a run guarantees, in JSON beside its ledger.

RUN is a job's output folder, a ledger file, or an MLflow run id, whose ledger is fetched into a folder of that name.
Options:
    delta=1e-5        default: that of the job""",
    "copy": """\
`python -m dpexp copy [OVERRIDE ...] FILE.yaml` writes a job's options to a file that `python -m dpexp FILE.yaml` runs.

The file has the options' comments. Edit it before you run it, or add overrides.""",
    "evaluate": """\
`python -m dpexp evaluate RUN` measures a trained model on its test set once more.

RUN is a job's folder or an MLflow run id. Options:
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "mirror": """\
`python -m dpexp mirror FOLDER` sends MLflow what the run of a job lacks.

FOLDER is that of a job that has ended, or was killed, while its server was away, or in the middle of a request. What
the run has is not sent again; a store without the run gets all of it. Options:
    uri=…             the store; default: that of the job""",
    "predict": """\
`python -m dpexp predict RUN FILE` lets a trained model predict.

RUN is a job's folder or an MLflow run id. FILE has inputs, one per row: .npy, .npz (its first array), .pt (a tensor) or
.csv (numbers); for data of your own, such as data=csv, as they are in its test set. Options:
    out=predictions.csv   the file to write: for a classifier, class and probabilities
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "report": """\
`python -m dpexp report RUN [RUN ...]` writes runs, or a sweep, on one HTML page, without a server or a script.

RUN is the folder of a job or a sweep, or the MLflow run id of one. Options:
    out=report.html   the file to write
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "resume": """\
`python -m dpexp resume RUN` continues an interrupted training in the same folder, ledger and MLflow run.

RUN is a job's folder, or the MLflow run id of a job of this machine. Options:
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "sample": """\
`python -m dpexp sample RUN [FILE]` lets a trained language model write synthetic texts, which cost no further ε.

RUN is a job's folder or an MLflow run id, of data=documents. FILE has public prompts, never training records: a table
with the fields of data.prompt, such as labels, and with count=… perhaps a column `share`, of the samples. Options:
    count=…             how many texts, for prompts drawn by their shares; default: one for each prompt
    temperature=1       lower: likelier words
    top_p=1             draw from the likeliest words that together have this probability
    out=samples.jsonl   the file to write: records that can be trained on
    batch=32            texts that are written at once
    seed=0              of the draws
    uri=sqlite:///outputs/mlflow.db   the store that has the run""",
    "schema": """\
`python -m dpexp schema data.path=FILE` writes the schema of a table for data=csv: a YAML file of public facts.

Options:
    out=FILE.yaml     the file to write; default: the name of the table, here
    data.test_path=…  the public test rows: kinds are guessed from them, and messages quote their cells
    data.person=…     the column that identifies a person, if ε shall protect people
    unsafe=true       fill in everything from the rows; jobs with the schema are tagged as not private""",
    "verify": """\
`python -m dpexp verify CERTIFICATE` computes a certificate again: from the ledger beside it, and ε by dp-accounting.

CERTIFICATE is a file, or the folder that `certificate` wrote it to. The exit status is not 0 if it is refuted.""",
    "version": "`python -m dpexp version` prints versions and the machine, for bug reports.",
    "help": """\
`python -m dpexp help [NAME]` lists the options, with the comments of the YAML files.

NAME is a configuration group, a value or section of the configuration, or a command; `--config-dir FOLDER` adds groups
of your own.""",
}
NO_OPTIONS = {  # key -> why it cannot be given
    "rounds": "is internal and follows from sampling; give sampling.steps",
    "draw": "is internal and is set by hydra/sweeper=private_selection",
    "norms": "is no option, since norms are always exact, and never estimated by projections",
}
GONE = {  # an option of earlier versions -> what to choose
    "model=least_squares": "choose logistic, which was as good or better wherever both were tried",
    "accountant=gdp": "choose pld: its ε was an approximation that may lie below the true one",
}
# The field's short names -> the key that means the same here
SYNONYMS = {
    "max_grad_norm": "clip_norm", "S": "clip_norm", "q": "sampling_rate", "sample_rate": "sampling_rate",
    "z": "noise_multiplier", "sigma": "noise_multiplier", "target_epsilon": "epsilon", "target_delta": "delta",
    "learning_rate": "lr", "lot_size": "expected_batch_size",
}  # fmt: skip


def import_targets(configuration: str) -> None:
    """Imports the modules of the classes that a configuration names, before dpexp imports Lightning.

    Lightning has two packages: if these modules use `lightning`, so does dpexp.
    """
    for target in {*re.findall(r"_target_: *['\"]?([\w.]+)\.\w+", configuration)}:
        if target.partition(".")[0] not in ("dpexp", "torch", "pytorch_lightning", "hydra"):
            with suppress(Exception):  # it is imported again where its objects are made
                import_module(target)


def check(arguments: Sequence[str]) -> None:
    """Refuses a flag or an override whose key or option does not exist, naming the nearest that does."""
    namespace = _parsed(arguments)
    if namespace.shell_completion:  # then install=bash and the like are no values
        return
    if namespace.resolve and not namespace.cfg:
        raise ConfigError("--resolve needs --cfg job, which then shows every value resolved.")
    roots = _roots_of(namespace)
    groups = sorted({path.name for root in roots for path in root.iterdir() if path.is_dir()})
    keys = sorted({*groups, *(f.name for f in fields(Config)), "hydra"} - {*NO_OPTIONS})
    for argument in namespace.overrides:
        key, equals, value = argument.partition("=")
        if argument.startswith("~"):
            continue
        if not equals:
            raise ConfigError(
                f"{argument}: this is no key=value, and no command{_nearest(argument, COMMANDS)} Values are key=value."
            )
        head = re.split(r"[./@]", key.lstrip("+"))[0]
        if head in NO_OPTIONS:
            raise ConfigError(f"{argument}: {head} {NO_OPTIONS[head]}.")
        is_new = not get_close_matches(head, keys, n=1, cutoff=0.8) and head not in SYNONYMS
        if key.startswith("+") and is_new:
            continue
        if head not in keys:
            raise ConfigError(f"{argument}: there is no {head!r}{_nearest_key(head, keys)}")
        chosen = any(other.startswith((f"{head}=", "experiment=", "sweep=")) for other in namespace.overrides)
        if head == "audit" and "." in key and not chosen:  # which is null by default
            raise ConfigError(f"{argument}: no audit is chosen; add audit=dirac.")
        if key in groups:
            options = sorted({path.stem for root in roots for path in (root / key).glob("*.yaml")})
            for option in value.strip("[]").split(","):
                if option in options or not option.replace("_", "").isalnum():
                    continue
                if (gone := f"{key}={option}") in GONE:
                    raise ConfigError(f"{gone} is gone; {GONE[gone]}.")
                raise ConfigError(f"{argument}: {key} has no option {option!r}{_nearest(option, options)}")


def texts_in(schema: Any, prefix: str = "") -> set[str]:
    """The keys of a configuration's schema whose values are texts, such as paths."""
    found = {f"{prefix}{value.name}" for value in fields(schema) if value.type in (str, str | None)}
    sections = (value for value in fields(schema) if is_dataclass(value.type))
    return found.union(*(texts_in(section.type, f"{prefix}{section.name}.") for section in sections))


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments, with each text in quotes that Hydra would not read as it is, such as a path with brackets.

    In a sweep, whose values have commas between them, only what Hydra cannot read at all is quoted.
    """
    namespace, texts = _parsed(arguments), texts_in(Config) | {"hydra.run.dir", "hydra.sweep.dir"}

    def is_read(key: str, value: str) -> bool:
        is_text = key.lstrip("+") in texts
        try:
            read = OverridesParser.create().parse_override(f"key={value}").value()
        except HydraException:
            return not is_text and value.startswith(("[", "{"))  # a list or dictionary with a mistake in it
        is_given = namespace.multirun or value == "null" or value.startswith(("'", '"'))
        return not is_text or is_given or (str(read) == value and not isinstance(read, list | dict))

    def quoted(argument: str) -> str:
        key, _, value = argument.partition("=")
        return argument if is_read(key, value) else f"{key}={QuotedString(value, Quote.single).with_quotes()}"

    return [quoted(one) if "=" in one and one in namespace.overrides else one for one in arguments]


def is_option(argument: str) -> bool:
    """Whether an argument is an option key=value, and no path that has an equals sign."""
    return "=" in argument and not os.path.exists(argument)


def read_options(schema: Any, options: Sequence[str]) -> Any:
    """An object of a schema, from options key=value; a text is taken as it is, and other values are YAML."""
    pairs = [option.partition("=")[::2] for option in options]
    texts = {key: value for key, value in pairs if key in texts_in(schema) and value != "null"}
    others = OmegaConf.from_dotlist([f"{key}={'text' if key in texts else value}" for key, value in pairs])
    made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), others))
    for key, value in texts.items():  # which OmegaConf would read, as ${…} and ???
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, made), name, value)
    return made


def as_audit(arguments: Sequence[str]) -> list[str]:
    """The arguments of the job that only audits its plan."""
    audit = [] if any(argument.startswith("audit=") for argument in arguments) else ["audit=dirac"]
    return [*arguments, *audit, "train=false"]


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Turns `FILE.yaml OVERRIDE ...`, a file that `copy` wrote, into Hydra's arguments; returns others unchanged."""
    if not arguments or not arguments[0].endswith(".yaml"):
        return [*arguments]
    path, others, found = Path(arguments[0]).resolve(), arguments[1:], None
    with suppress(OSError, UnicodeError):
        found = yaml.safe_load(path.read_text())
    if not isinstance(found, dict) or "defaults" not in found:
        raise ConfigError(f"{arguments[0]} is no file of options, as python -m dpexp copy FILE.yaml writes one.")
    keys = {one: one.partition("=")[0].lstrip("+") for one in others if "=" in one}
    if chosen := [one for one, key in keys.items() if (CONF / key).is_dir() and not key.startswith("hydra/")]:
        raise ConfigError(
            f"{chosen[0]} would not replace the values in {arguments[0]}; edit it, or copy again with {chosen[0]}."
        )
    searchpath = QuotedString(f"file://{CONF}", Quote.single).with_quotes()
    return ["--config-path", str(path.parent), "--config-name", path.stem, *others, f"hydra.searchpath=[{searchpath}]"]


def config_file(hydra: Mapping[str, Any]) -> Path | None:
    """The FILE.yaml that a job was run with, from its own `hydra.yaml`; None: there was none."""
    sources = {source["provider"]: source["path"] for source in hydra["runtime"]["config_sources"]}
    path = Path(sources["main"], f"{hydra['job']['config_name']}.yaml")
    return path if "hydra.searchpath in command-line" in sources and path.parent != CONF else None


def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """The configuration that `python -m dpexp` would have with these overrides, for notebooks and scripts.

    Examples:
        >>> import dpexp
        >>> cfg = dpexp.compose("model=logistic", "privacy.epsilon=2")
        >>> cfg.privacy.epsilon, cfg.data.n
        (2.0, 1437)

    Args:
        config_dir: a folder with options of your own, as with `--config-dir`.

    Raises:
        ConfigError: an override whose key or option does not exist.
    """
    config.register()
    own = [] if config_dir is None else [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    check([*([] if config_dir is None else ["--config-dir", str(config_dir)]), *overrides])
    of_job = GlobalHydra.instance().hydra  # of the job in which this is called
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose_by_hydra("config", [*as_overrides(overrides), *own])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error
    finally:
        GlobalHydra.instance().hydra = of_job


def sentence(error: HydraException | OmegaConfBaseException) -> str:
    """An error of Hydra or OmegaConf as one sentence, with what would be accepted."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, ConfigError):  # of a sweeper that Hydra makes
        return str(cause)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        section = str(cause.full_key).rpartition(".")[0]
        known = [str(key) for key in cause.parent_node]
        advice = f" To add one that its _target_ takes, write +{cause.full_key}." if "_target_" in known else ""
        if section == "trainer":
            if cause.key in REFUSED:
                return f"{cause.full_key} cannot be honoured: {REFUSED[cause.key]}."
            advice = f" For an option of Lightning's Trainer, write +{cause.full_key}."
        if section and not known:
            return f"{cause.full_key}: no {section} is chosen; add {section}=OPTION (python -m dpexp help {section})."
        if options := config.options_by_key().get(str(cause.full_key)):
            return f"{cause.full_key}: {section} has no key {cause.key!r}, as {' or '.join(options)} has.{advice}"
        where = f"{section} has" if section else "there is"
        return f"{cause.full_key}: {where} no key {cause.key!r}{_nearest(str(cause.key), known)}{advice}"
    if isinstance(cause, OmegaConfBaseException) and (refusal := config.refusal_of_interpolation(cause)):
        return refusal
    override = str(error).splitlines()[0].removeprefix("Error merging override ").rstrip(".")
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {override}; quote values with brackets or spaces for the shell."
    if override.startswith("Ambiguous value"):
        return f"{override}: several values need -m, which runs each of them; a list is written [1,2]."
    if plugin := re.search(r"Could not find '(hydra/\w+)/(\w+)'", override):
        extras = "joblib, slurm, ray or optuna"
        return f"{plugin[1]}={plugin[2]} is not installed; pip install 'dpexp[EXTRA]' with EXTRA {extras}."
    if isinstance(cause, OmegaConfBaseException):
        where_is_lost = cause is error or override.startswith("In ")
        return f"{cause.full_key if where_is_lost else override}: {str(cause).splitlines()[0].rstrip('.')}."
    return f"{override}."


def _parsed(arguments: Sequence[str]) -> Namespace:
    """The arguments, parsed as Hydra parses them."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(arguments)}: {message}; flags go before all values, see --help.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def _roots_of(namespace: Namespace) -> list[Path]:
    """The folders with configuration groups: dpexp's own, and that of --config-dir."""
    own = Path(namespace.config_dir) if namespace.config_dir else None
    if own is not None and not own.is_dir():
        raise ConfigError(f"--config-dir={own}: there is no such folder.")
    return [CONF, own] if own else [CONF]


def _nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the nearest of the known words, and all of them."""
    known = [*known]
    near = [SYNONYMS[word]] if SYNONYMS.get(word) in known else get_close_matches(word, known, n=1)
    return (f"; did you mean {near[0]!r}? " if near else ". ") + f"Known: {', '.join(known)}."


def _nearest_key(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names what may be meant by a key that does not exist.

    These are the keys of any section that end in the word, as sampling.expected_batch_size ends in batch_size; if there
    are none, the nearest of the known keys.
    """
    known, meant = [*known], SYNONYMS.get(word, word)
    keys = [key for key in config.options_by_key() if key.endswith((f".{meant}", f"_{meant}"))]
    return f"; did you mean {' or '.join(keys)}?" if keys and meant not in known else _nearest(word, known)


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
    """The overview, or the description of one command, configuration group or value."""
    namespace = _parsed(arguments)
    names = [argument for argument in namespace.overrides if "=" not in argument]
    groups = _options_of_groups(_roots_of(namespace))
    if not names:
        return _overview(groups)
    if len(names) > 1:
        raise ConfigError(f"help {' '.join(names)}: one name at a time.")
    (name,) = names
    described = [COMMANDS[name]] if name in COMMANDS else []
    described += [text for text in [group_descriptions().get(name)] if text]
    described += [_described(name, path) for path in groups.get(name, ())]
    values = _values()
    if not described and name not in values:
        known = sorted({*COMMANDS, *groups, *values})
        raise ConfigError(f"help {name}: there is no {name!r}{_nearest(name, known)}")
    return "\n\n".join(described or [values[name].rstrip()])


def _overview(groups: dict[str, list[Path]]) -> str:
    commands = [usage.partition("\n")[0] for usage in COMMANDS.values()]
    about = {group: f"\n    {text}" for group, text in group_descriptions().items()}
    options = [
        f"{group}: {', '.join(path.stem for path in paths)}{about.get(group, '')}" for group, paths in groups.items()
    ]
    return "\n".join([
        HEADER, "== Commands ==", "", *commands, "",
        "== Configuration groups (group=option) ==", "", *options, "",
        "== Values (key=value; section.key=value) ==", "", "".join(_values().values()).rstrip(), "", FOOTER,
    ])  # fmt: skip


def group_descriptions() -> dict[str, str]:
    """What each configuration group decides: the comments of the defaults in config.yaml."""
    defaults = re.sub(r"\n +# *", " ", (CONF / "config.yaml").read_text().partition("\n\n")[0])
    return dict(re.findall(r"^  - (?:override )?([\w/]+): .*?  # (.*)$", defaults, re.MULTILINE))


def _options_of_groups(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of each group's options, sorted by name. Of two files of the same name, the first root's counts."""
    found: dict[str, dict[str, Path]] = {}
    for root in roots:
        for path in sorted([*root.glob("*/*.yaml"), *root.glob("hydra/*/*.yaml")]):
            found.setdefault(path.parent.relative_to(root).as_posix(), {}).setdefault(path.stem, path)
    return {group: [options[name] for name in sorted(options)] for group, options in sorted(found.items())}


def _described(group: str, path: Path) -> str:
    """An option's first comment, and its values."""
    listed = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    is_default = {group: path.stem} in listed or {f"override {group}": path.stem} in listed
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("# @package", "_target_:"))]
    length = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    shown = [line.removeprefix("#").strip() for line in lines[:length]] + lines[length:]
    heading = f"{group}={path.stem}{' (the default)' if is_default else ''}"
    return "\n".join([heading, *(f"    {line}".rstrip() for line in shown)])


def _values() -> dict[str, str]:
    """The text, in config.yaml, of each value and section that belongs to no group and is not internal."""
    blocks = re.split(r"^(?=\w)", (CONF / "config.yaml").read_text(), flags=re.MULTILINE)
    named = {block.partition(":")[0]: block for block in blocks[1:]}
    return {name: block for name, block in named.items() if name not in ("defaults", "hydra", *NO_OPTIONS)}
