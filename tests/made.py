"""Folders of finished jobs, in milliseconds: what a job leaves, but for its trained model and details of its plan."""

import json
import math
import os
import shutil
import socket
from functools import cache

from omegaconf import OmegaConf
from runs import write_run

import dpexp
from dpexp.accounting.ledger import Ledger, Round, SumQueryEvent, write_ledger
from dpexp.accounting.releases import applicable_accountants
from dpexp.accounting.risk import risk
from dpexp.accounting.sampling import sampling_event
from dpexp.tracking.job_folder import (
    CONFIGURATION_KEY,
    LEDGER,
    METRICS,
    PLANNED_LEDGER,
    RECORD,
    RUN,
    STATUS,
    write_json,
)

composed = cache(dpexp.compose)
risk_of = cache(lambda adjacency, rounds: risk(Ledger(adjacency, dict(rounds))).figures())
TESTED = {"test_loss": 1.5, "test_accuracy": 0.625, "test_majority_accuracy": 0.125, "test_auc": 0.9}
CLOSED = [RECORD, "config.yaml", "overrides.yaml", PLANNED_LEDGER, "result.json", "epsilon.png"]  # files for the run


def made_job(folder, *overrides, rounds=3, sigma=3.0, ledger=None):
    """Makes the folder of a job of logistic regression on digits; returns it.

    Args:
        overrides: of its configuration; with `train=false`, it has only planned.
        ledger: what it has released, if not so many `rounds` of one sum with noise `sigma`.
    """
    words = ["model=logistic", *overrides]
    config = OmegaConf.to_container(composed(*words), resolve=True)
    n, trained, private = config["data"]["n"], config["train"], config["privacy"]["enabled"]
    if ledger is None:
        sample = sampling_event("poisson", config["sampling"]["expected_batch_size"] / n, n)
        ledger = Ledger("add_remove", {Round(sample, (SumQueryEvent("all", 1.0, sigma),)): rounds})
    reason = ledger.not_private_reason if private else "trained without privacy"
    result = {"private": reason is None, "trained": trained, "metrics": TESTED if trained else {}, "seconds": 0.1}
    result |= {"rounds": len(ledger), "mlflow_run_id": None, CONFIGURATION_KEY: "made"}
    (folder / ".hydra").mkdir(parents=True)
    if private:
        result |= _of_privacy(ledger, config)
        write_ledger(folder / PLANNED_LEDGER, ledger)
    if private and trained:
        write_run(folder / LEDGER, ledger)
    for home in (folder, folder / ".hydra"):
        OmegaConf.save(OmegaConf.create(config | {"rounds": len(ledger)}), home / "config.yaml")
    OmegaConf.save(OmegaConf.create(words), folder / ".hydra" / "overrides.yaml")
    write_json(folder / "result.json", result)
    _write_record(folder, config, reason, result)
    return folder


def tracked_job(folder, *overrides, **facts):
    """Makes such a folder, and its run in the store that its configuration names; returns the folder."""
    from dpexp.tracking.mirror import mirror_folder

    run_id = mirror_folder(made_job(folder, *overrides, **facts), None)
    (folder / RUN).write_text(run_id)
    return folder


def _of_privacy(ledger, config):
    """What a result says of privacy."""
    delta, names = config["privacy"]["delta"], config["accountant"]["names"]
    names = applicable_accountants(ledger) if names == ["all"] else names
    sampling, queries = next((round_.sampling, round_.queries) for round_ in ledger.rounds)
    return {
        "epsilon": {name: dpexp.epsilon(ledger, delta, name) for name in names}, "delta": delta,
        "risk": risk_of(ledger.adjacency, (*ledger.rounds.items(),)), "adjacency": ledger.adjacency,
        "unit": ledger.unit, "q": sampling.q, "n": sampling.n,
        "noise_multiplier": 1 / math.hypot(*(query.S / query.sigma for query in queries)),
        "groups": {query.group: {"S": query.S, "sigma": query.sigma, "share": 1 / len(queries)} for query in queries},
    }  # fmt: skip


def _write_record(folder, config, reason, result):
    """Writes what MLflow mirrors; see dpexp.tracking.record."""
    shutil.copy(folder / ".hydra" / "overrides.yaml", folder)
    if (folder / LEDGER).exists():
        (folder / "epsilon.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    tags = {"private": f"no: {reason}" if reason else "yes", "host": socket.gethostname(), "pid": str(os.getpid()),
            "output": str(folder.resolve()), "start": "0f"}  # fmt: skip
    delta, names = config["privacy"]["delta"], [*result.get("epsilon", ())]
    spends = {"data_id": config["data"]["id"], "budget": config["privacy"]["budget"], "trains": config["train"]}
    write_json(folder / RECORD, {
        "name": folder.name, "start": 1_000_000, "tags": {f"dpexp.{key}": value for key, value in tags.items()},
        "starts": ["0f"], "params": {"privacy.delta": str(delta)}, "configuration": {"privacy.delta": str(delta)},
        "files": CLOSED,
        "store": config["tracking"], "delta": delta, "accountants": names,
        "spends": spends if config["data"]["id"] else None,
        "data": {"name": "digits", "digest": f"n={config['data']['n']}", "source_type": "code", "source": "{}"},
    })  # fmt: skip
    rows = [{"step": 0, "metrics": {"with rounds": result["rounds"]}},
            {"step": result["rounds"], "metrics": result["metrics"]}]  # fmt: skip
    (folder / METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_json(folder / STATUS, {"status": "FINISHED", "reason": None, "time": 2_000_000})
