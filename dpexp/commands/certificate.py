"""`python -m dpexp certificate`: what NIST SP 800-226 asks of a guarantee, in JSON; and `verify`, which checks that."""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.coverage import SENSITIVITY
from dpexp.accounting.independent import estimates
from dpexp.accounting.ledger import Ledger, incomplete_reason, ledger_so_far
from dpexp.accounting.ledger.events import is_number, neighbours
from dpexp.accounting.ledger.integrity import read_end
from dpexp.accounting.releases import releases
from dpexp.accounting.risk import FIGURES, TAIL, gaussian, in_words, risk
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling.policy import Release
from dpexp.commands.account import console, delta_of, releases_before_training, source_of
from dpexp.commands.command_line import is_option, read_options
from dpexp.config import tracking_uri
from dpexp.errors import ClaimRefuted, ConfigError
from dpexp.tracking.job_folder import RUN, finished_result

VERSION, SUFFIX, PLAN = 1, ".certificate.json", "A plan, not a run"
LOOSEST = 1.01  # the largest ε that agrees with dp-accounting, over its pessimistic one
_CURVE = [float(f"1e-{k}") for k in range(3, 13)]  # δ
_TOLERANCE = 1e-4  # relative, of bounds: between versions of dpexp, and between processors
TERMS = {
    "guarantee": "P(M(D) in A) <= exp(epsilon) * P(M(D') in A) + delta for neighbouring data sets D and D' and every "
    "event A, where M is all that the run gives away: weights, checkpoints, logs and metrics. All numbers are upper "
    f"bounds. advantage is TPR - FPR of any test for one record; mu holds up to a probability of {TAIL:g}.",
    "trust_model": "Central: who trains is trusted; who sees what the run gives away may know code and other records.",
    "public": "All numbers in run, such as n; configuration, constants, initial weights; validation and test sets.",
    "assumed": "The training step is a function of one record, the weights and random numbers. Code is honest, though "
    "it may be mistaken. The keys of random numbers are secret, and ChaCha20 cannot be told from random numbers.",
    "several_runs": "Only this run is covered. Choosing by looking at several private runs, as of hyperparameters, "
    "costs what all of them cost together, which `python -m dpexp account` computes.",
    "floating_point": "epsilon is that of exact real numbers. The rounding of sums, forward passes and noise (float64, "
    "from 63-bit uniforms) is not covered; that of one record's contribution is.",
    "not_covered": "Time and memory, terminals, error files, and what not_private_reason names.",
    "rounds": "What the ledger says happened, each written before its result was used: vectors of L2 norm at most S "
    "(after division by the scales of joint clipping) were summed over a sample at average rate q, and noise of "
    "standard deviation sigma was added, in the same units; with bands, sigma times correlated noise. A query that is "
    "answered once has noise of this scale, and S is its sensitivity.",
    "releases": "What of it one record can be in, count times each, with probability q: z is noise over sensitivity, "
    "(sum of (S/sigma)^2)^(-1/2) of a round over sensitivity_in_S; of laplace, scale over L1 sensitivity. One of "
    "random_allocation is all of an epoch's rounds, as many as `steps`, of which the record is in one, at random.",
}


@dataclass
class Options:
    delta: float | None = None


def certificate(arguments: Sequence[str]) -> Path:
    """Writes a run's certificate beside its ledger, and returns its path.

    The files of a run that is given by its id in MLflow are fetched first.
    """
    cfg: Options = read_options(Options, [*filter(is_option, arguments)])
    named = [argument for argument in arguments if not is_option(argument)]
    if len(named) == 1 and not Path(named[0]).exists() and not Path(named[0]).suffix:
        from dpexp.tracking.read import pulled

        others = "ledger.end.json", "config.yaml", "result.json"
        with pulled(tracking_uri(), named[0], "ledger.jsonl", *others) as folder:
            shutil.copytree(folder, named[0])
    file = _file(named)
    content = _content(file)
    source = source_of(str(file.parent if file.name == "ledger.jsonl" else file), "")
    statement = _statement(file, content, source.ledger, delta_of(cfg.delta, [source.delta]))
    path = file.with_suffix(SUFFIX)
    try:
        path.write_text(json.dumps(statement, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the certificate cannot be written beside its ledger: {error}.") from error
    _print(statement, source.ledger)
    console.print(f"Certificate: {path}", markup=False, highlight=False)
    return path


def verify(arguments: Sequence[str]) -> None:
    """Checks a certificate, or that of a run, against its ledger, and its ε against dp-accounting.

    Raises:
        ClaimRefuted: the ledger was changed, says something else or costs more, or dp-accounting disagrees.
    """
    path = _file(arguments)
    path = path if path.suffix == ".json" else path.with_suffix(SUFFIX)
    said, file = _read(path)
    delta, claimed, content = said["guarantee"]["delta"], said["guarantee"]["epsilon"], _content(file)
    ledger = ledger_so_far(file)
    own = _statement(file, content, ledger, delta)
    if (found := own["run"]["ledger"]["sha256"]) != said["run"]["ledger"].get("sha256"):
        raise ClaimRefuted(f"the ledger {file} is not the one that {path} certifies: its SHA-256 is {found}.")
    _print(own, ledger)
    wrong = [f"{section} is not part of it" for section in said.keys() - own.keys()]
    for section in ("run", "terms"):
        facts, given = own[section], said.get(section, {})
        wrong += [
            f"{section}.{key} is not what the ledger says"
            for key in facts | given
            if _text(given.get(key)) != _text(facts.get(key))
        ]
    for name in own["guarantee"] | said["guarantee"]:
        claim, found = said["guarantee"].get(name), own["guarantee"].get(name)
        holds = is_number(claim) and is_number(found) and claim >= found * (1 - _TOLERANCE)
        if not (holds or claim is found is None):
            wrong.append(f"its {name} is {claim!s:.60}, where the ledger costs {found}")
    other = f"dp-accounting {version('dp-accounting')}"
    checked = "by dp-accounting too"
    try:
        low, high = estimates(releases(ledger), delta, epsilon(ledger, delta))
        between = f"{other} finds ε between {low:.6g} (optimistic) and {high:.6g} (pessimistic)"
        console.print(f"{between}.")
        wrong += [] if low <= claimed <= LOOSEST * high else [f"{between}, where {claimed} is claimed"]
    except ConfigError as error:
        checked = "not recomputed by dp-accounting"
        console.print(f"Not recomputed by {other}: {error}")
    if wrong:
        raise ClaimRefuted(f"{path} is refuted: {'; '.join(wrong)}.")
    verdict = PLAN if _is_plan(own) else "Verified"
    console.print(
        f"[bold]{verdict}[/]: the certificate says what its ledger does, whose cost ε = {claimed} covers, {checked}."
    )


def _is_plan(statement: Mapping[str, Any]) -> bool:
    """Whether the certified ledger lacks the number that each run's has."""
    return statement["run"]["ledger"]["run"] is None


def _text(value: Any) -> str:
    """A value as JSON, which tells true from 1."""
    return json.dumps(value, sort_keys=True)


def _file(named: Sequence[str]) -> Path:
    """The ledger, or the certificate, that a command line names by its path or its folder."""
    if len(named) != 1:
        raise ConfigError(f"one run must be given, not {' and '.join(named) or 'none'}; see --help.")
    path = Path(named[0])
    return path / "ledger.jsonl" if path.is_dir() else path


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a ValueError if a key is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _read(path: Path) -> tuple[dict[str, Any], Path]:
    """The content of a certificate, and the file of its ledger."""
    try:
        said: dict[str, Any] = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
        name, terms = said["run"]["ledger"]["file"], said["terms"]
        numbers = said["guarantee"]["delta"], said["guarantee"]["epsilon"]
        can_be_read = all(map(is_number, numbers)) and isinstance(terms, dict) and name.isprintable()
        if said["dpexp_certificate"] != VERSION or not can_be_read:
            raise ValueError
        return said, path.parent / Path(name).name
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        advice = "name one that `python -m dpexp certificate RUN` wrote"
        raise ConfigError(f"{path} is no certificate of version {VERSION} that can be read; {advice}.") from error


def _content(path: Path) -> bytes:
    """The ledger file's bytes. Read before the ledger is parsed: a running job may append rounds in between."""
    return path.read_bytes() if path.is_file() else b""


def _statement(path: Path, content: bytes, ledger: Ledger, delta: float) -> dict[str, Any]:
    """The content of a certificate: what follows from the ledger at `path`, the terms, and what computed it."""
    figures = risk(ledger).figures()
    return {
        "dpexp_certificate": VERSION,
        "guarantee": {
            "epsilon": _bound(epsilon(ledger, delta)),
            "delta": delta,
            **{name: _bound(figures.get(name, math.inf)) for name in FIGURES},
            **{f"epsilon_at_delta_{at:g}": _bound(epsilon(ledger, at)) for at in _CURVE},
        },
        "run": {
            "private": ledger.not_private_reason is None,
            "not_private_reason": ledger.not_private_reason,
            "privacy_unit": ledger.unit,
            "adjacency": ledger.adjacency,
            "holds": neighbours(ledger.adjacency, ledger.unit),
            "sensitivity_in_S": SENSITIVITY[ledger.adjacency],
            "accountant": "pld",
            "ledger": {
                "file": path.name,
                "sha256": hashlib.sha256(content).hexdigest(),
                "run": json.loads(content.partition(b"\n")[0]).get("run"),
                "complete": not ledger.incomplete and read_end(path) is not None,
                "part_of_data": str(ledger.part) if ledger.part else None,
            },
            "releases": [{"count": count, **_facts(release)} for release, count in releases(ledger).items()],
            "rounds": [{"count": count, **round_.facts()} for round_, count in ledger.rounds.items()],
        },
        "terms": TERMS,
        "made": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "mlflow_run_id": (finished_result(path.parent) or {}).get(RUN),
            **{name: version(name) for name in ("dpexp", "dp_accounting", "numpy", "scipy", "torch")},
        },
    }


def _bound(value: float) -> float | None:
    """An upper bound, rounded up; None if it is infinite."""
    return float(up(value, 6)) if math.isfinite(value) else None


def _facts(release: Release) -> dict[str, Any]:
    """The attributes of a release that are not None, to 12 digits."""
    given = {name: value for name, value in vars(release).items() if value is not None}
    return given | {"z": float(f"{release.z:.12g}")}


def _print(statement: Mapping[str, Any], ledger: Ledger) -> None:
    """Prints what a certificate states, and warns of what it does not cover."""
    guarantee, holds = statement["guarantee"], statement["run"]["holds"]
    rounded, at = guarantee["epsilon"], up(guarantee["delta"], 6)
    rounds = f"{ledger.training_rounds or 'no'} rounds{releases_before_training(ledger)}"
    plan = f"[bold red]{PLAN}[/]: " if _is_plan(statement) else ""
    console.print(f"{plan}ε = {rounded} by pld at δ = {at}, {escape(holds)}; {rounds}")
    figures = {name: guarantee[name] for name in FIGURES if guarantee[name] is not None}
    console.print(f"In words: {escape(in_words(figures, ledger.unit))}{gaussian(figures)}")
    if ledger.not_private_reason is not None:
        console.print(f"[bold red]ε does not cover all that the run shows[/]: {escape(ledger.not_private_reason)}.")
    if ledger.incomplete:
        console.print(f"[bold red]The ledger ends early[/]: {escape(incomplete_reason(ledger))}.")
    elif not (statement["run"]["ledger"]["complete"] or _is_plan(statement)):
        console.print(f"[bold red]More may have been spent[/]: {escape(str(ledger.unverified))}.")
