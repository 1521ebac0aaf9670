"""`python -m dpexp sample`: synthetic texts, written by the language model of a finished job."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pandas import DataFrame, Series, to_numeric
from rich.progress import track

from dpexp.accounting.rounding import up
from dpexp.commands.saved_jobs import Saved, located, run_and_options
from dpexp.errors import ConfigError, Count, Positive, Rate, between, checks_arguments, made_from
from dpexp.reporting.terminal import console
from dpexp.tracking.job_folder import WEIGHTS
from dpexp.training.data.documents import Documents
from dpexp.training.data.raw import files_of
from dpexp.training.pretrained import read_metadata

_SHARE = "share"  # the column of a prompt's share of the samples


@checks_arguments
@dataclass(frozen=True)
class Options:
    """How texts are sampled.

    Args:
        count: how many texts; None: one for each prompt.
        temperature: scores are divided by it.
        top_p: each token is drawn from the likeliest ones that together have this probability.
        seed: that of the draws.
        batch: how many texts are written at once.
        out: the file they go to.
    """

    count: Count | None = None
    temperature: Positive = 1.0
    top_p: Rate = 1.0
    seed: Annotated[int, between(0, 2**32 - 1, "[]")] = 0
    batch: Count = 32
    out: str = "samples.jsonl"


def sample(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Writes texts as lines of JSON, which have the form of the training records, and returns them.

    They depend on the private records through the released model alone, so that they cost no ε of their own.
    """
    names = [field.name for field in fields(Options)]
    run, given = run_and_options("sample", arguments, ["data", "uri", *names])
    path, uri = given.pop("data", None), given.pop("uri", None)
    options = _options(given)
    with located(run, uri) as folder:
        saved, about = Saved(folder), read_metadata(folder / WEIGHTS)
        if not isinstance(saved.data, Documents):
            raise ConfigError(f"sample: the model of {run} writes no texts; data=documents trains one that does.")
        if path is not None and _is_private(path, saved.cfg.data.path, folder):
            raise ConfigError(f"sample: {path} holds the training records, and a prompt must be public.")
        prompts = _prompts(saved.data, path, options)
        encoded = saved.data.prompt_ids(prompts)
        saved.restore()
    torch.manual_seed(options.seed)
    rows, form, found = prompts.to_dict("records"), saved.data.form, []
    batches = _batches([len(ids) for ids in encoded], options.batch)
    try:
        file = Path(options.out).expanduser().open("w")
    except OSError as error:
        raise ConfigError(f"out={options.out} cannot be written ({error.strerror or error}).") from error
    with file:
        for batch in track(batches, "samples", console=console, transient=True):
            texts = saved.data.continued(
                saved.model, [encoded[k] for k in batch], do_sample=True, temperature=options.temperature,
                top_p=options.top_p, top_k=0,
            )  # fmt: skip
            made = [form.record_of(rows[k], text) for k, text in zip(batch, texts, strict=True)]
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in made)
            file.flush()
            found += made
    console.print(f"{len(found)} texts: {options.out}. {_cost(about)}", soft_wrap=True, markup=False)
    return found


def _options(given: Mapping[str, str]) -> Options:
    values: dict[str, Any] = {name: value if name == "out" else yaml.safe_load(value) for name, value in given.items()}
    with made_from("sample"):
        return Options(**values)


def _is_private(path: str, private: str, folder: Path) -> bool:
    """Whether a file is that of the training records of a job, or one of them; a copy is not recognized."""
    hydra = folder / ".hydra" / "hydra.yaml"  # which a folder from a server has not
    start = Path(yaml.safe_load(hydra.read_text())["hydra"]["runtime"]["cwd"]) if hydra.exists() else Path.cwd()
    asked = Path(path).expanduser().resolve()
    files = files_of(str(start / Path(private).expanduser()))
    return path == private or any(
        file.resolve() in (asked, *asked.parents) or (asked.exists() and file.samefile(asked)) for file in files
    )


def _prompts(data: Documents, path: str | None, options: Options) -> DataFrame:
    """The inputs that are continued, one for each sample.

    Raises:
        ConfigError: there are none, or their shares are no shares.
    """
    if path is None:
        if not data.form.asks_nothing:
            raise ConfigError(f"sample needs FILE, public prompts with the fields {', '.join(data.form.asked)}.")
        return DataFrame([data.form.input_of("")] * (options.count or 1))
    rows = data.read_inputs(Path(path).expanduser())
    if not len(rows):
        raise ConfigError(f"sample: {path} holds no prompt.")
    if options.count is None:
        return rows
    shares = to_numeric(rows.get(_SHARE, Series(1.0, rows.index)), errors="coerce")
    if not ((shares >= 0) & (shares < float("inf"))).all() or not shares.sum() > 0:
        raise ConfigError(f"sample: each {_SHARE} in {path} must be a finite number of at least 0, and one above 0.")
    return rows.sample(options.count, replace=True, weights=shares, random_state=options.seed, ignore_index=True)


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The prompts' places in batches of at most `most` of one length, the shorter ones first."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or len(batches[-1]) == most or lengths[batches[-1][0]] != lengths[place]:
            batches.append([])
        batches[-1].append(place)
    return batches


def _cost(about: Mapping[str, str]) -> str:
    """What the texts cost, in words, by the metadata of the model's weights."""
    if about.get("private") != "True":
        return "The model is not private, and nor are they."
    epsilon, delta = up(float(about["epsilon"]), 4), about["delta"]
    claimed = f"(ε = {epsilon}, δ = {delta})-private"
    return f"They cost no ε of their own: if the prompts are public, they and the model are {claimed}."
