"""What the user sees in the terminal: the plan, the progress, the result."""

import itertools
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import POWER, Audit
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, ParallelQueryEvent, Round, SamplingEvent, ledger_so_far
from dpexp.accounting.membership_inference import Membership
from dpexp.accounting.releases import unamplified
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.noise.correlated import deviation
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.plan.schedules import Schedule
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.reporting.wording import in_words, up

console = Console()
_NAMED = 40  # parameters


def neighbours(adjacency: str, unit: str = "record") -> str:
    """What two data sets differ in that are to be told apart, in words."""
    return {
        "add_remove": f"for adding or removing one {unit}",
        "replace_one": f"for replacing one {unit} by another",
        "replace_null": f"for replacing one {unit} by the null {unit}",
    }[adjacency]


def announce(cfg: DictConfig, plan: PrivacyPlan | None, told: str = "") -> None:
    """Prints the plan as a table, and what else is to be `told` of it."""
    if plan is None:
        console.print("[bold]Not private:[/] privacy.enabled=false.")
        return
    console.print(
        f"[bold]Plan[/]: {plan.rounds} rounds, sampling {plan.sampling.name} at q = {plan.sampling.q:.5g} of "
        f"n = {plan.n} (about {plan.sampling.q * plan.n:.0f} {plan.privacy_unit.plural}), z = "
        f"{plan.noise_multiplier:.4g}"
        + (", on a schedule" if plan.schedule != Schedule() else "")
        + (", exact noise" if plan.discrete else "")
        + (f", noise correlated over {len(plan.bands)} rounds" if len(plan.bands) > 1 else "")
        + (f", clip {plan.clip_rules}" if plan.clip_rules else ""),
        soft_wrap=True,
    )
    if plan.calibration is not None:
        solved = plan.calibration
        spent = ", ".join(f"{name} = {up(figure, 4)}" for name, figure in solved.spent)
        console.print(f"Solved for {solved.knob} = {solved.value:.6g}, which costs {spent}")
    for event in plan.preprocessing:
        console.print(f"Before the first round: {before_training(event, plan, cfg.privacy.delta)}", soft_wrap=True)
    console.print(plan_table(plan))
    if (without := unamplified(plan.ledger())) is not None:
        console.print(without, soft_wrap=True)
    if told:
        console.print(told, soft_wrap=True)
    if cfg.privacy.delta >= 1 / plan.n:
        console.print(
            f"[bold red]privacy.delta={cfg.privacy.delta:g} is not below 1/n = {1 / plan.n:.2g}[/]: such a δ allows "
            f"even that one {plan.privacy_unit}, picked at random, is published as it is. Well below 1/n is usual."
        )
    if cfg.privacy.noise_seed is not None:
        console.print("[bold red]privacy.noise_seed is set: whoever knows it can subtract the noise.[/]")
    if cfg.diagnostics == "unsafe":
        console.print("[bold red]diagnostics=unsafe: this run shows private training statistics.[/]")


def announce_tuned(module: pl.LightningModule) -> None:
    """Names what is trained, where that is not all."""
    numbers = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in module.parameters())
    if sum(numbers.values()) < total:
        some = [*numbers][:_NAMED]
        more = f" and {len(numbers) - len(some)} more" if len(numbers) > len(some) else ""
        console.print(
            f"[bold]Trained[/]: {sum(numbers.values()):,} of {total:,} numbers: {escape(', '.join(some))}{more}",
            soft_wrap=True,
        )


def before_training(event: OneTimeQueryEvent | ParallelQueryEvent, plan: PrivacyPlan, delta: float) -> str:
    """A preparation in words, with what it costs alone."""
    parts = event.queries if isinstance(event, ParallelQueryEvent) else (event,)
    disjoint = f", of {len(parts)} disjoint parts by {event.parts_by}" if isinstance(event, ParallelQueryEvent) else ""
    noise = "σ" if event.noise == "gaussian" else "Laplace noise b"
    scale = max(part.scale for part in parts)
    alone = Ledger(plan.adjacency, {Round(SamplingEvent("all", 1.0, plan.n), (event,)): 1})
    cost = f"alone ε = {up(epsilon(alone, delta), 3)}"
    return f"{event.query}{disjoint}: S = {parts[0].S:.4g}, {noise} = {scale:.4g}, {cost}"


def plan_table(plan: PrivacyPlan) -> Table:
    """One line a group; the noise is that of one coordinate of the released average (α_j σ̃_g / qn, or more if it is
    correlated)."""
    table = Table("group", "vectors", "d_g", "S_g", "σ̃_g", "share", "noise per coordinate")
    for group in plan.groups:
        noises = [alpha * deviation(group.sigma, group.bands) / (plan.sampling.q * plan.n) for alpha in group.alphas]
        low, high = f"{min(noises):.3g}", f"{max(noises):.3g}"
        table.add_row(
            group.name + (f", every {group.every_n_rounds} rounds" if group.every_n_rounds > 1 else ""),
            str(len(group.vectors)),
            f"{group.d:,}",
            f"{group.S:.4g}",
            f"{group.sigma:.4g}",
            f"{group.share:.3f}",
            low if low == high else f"{low} – {high}",
        )
    return table


class RoundBar(pl.callbacks.ProgressBar):
    """Rounds done, what ε is at most, rounds a second; of a trial, whose place in its sweep it shows, until it ends."""

    def __init__(self, rounds: int, privacy: PrivacyCallback | None, place: str | None = None) -> None:
        super().__init__()
        self._rounds = rounds
        self._place = place
        self._privacy = privacy
        self.tells_values = True  # that the plan releases
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        place = [TextColumn(escape(self._place))] if self._place else []
        self._progress = Progress(
            *place,
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[epsilon]}"),
            TextColumn("{task.fields[released]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=self._place is not None,
            disable=self._place is not None and not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=self._rounds, epsilon="", released="", rate="")
        self._progress.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._progress is None:
            return
        task = self._progress.tasks[0]
        if task.completed == 0 and self._privacy and self._privacy.compiling and self._place is None:
            console.print(f"The step is {self._privacy.compiling}.", soft_wrap=True)
        readings = self._privacy.readings if self._privacy else None
        spent = f"ε ≤ {up(readings.at_most, 4)}" if readings else "" if self._privacy else "not private"
        self._progress.update(
            self._task,
            completed=trainer.global_step,
            epsilon=spent,
            released=", ".join(_released(self._privacy.estimates)) if self._privacy and self.tells_values else "",
            rate=f"{task.speed:.1f} rounds/s" if task.speed else "",
        )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _released(estimates: MetricEstimates) -> Iterator[str]:
    """The first few values."""
    for name in itertools.islice(estimates.history, 3):
        value, sd = estimates.moving_average(name)
        yield f"{escape(name)} {value:.3g}" + (f" ± {sd:.1g}" if sd else "")


def interrupted(plan: PrivacyPlan | None, output: Path, delta: float, accountant: str) -> None:
    """Says how far a run came that was stopped, and what it has cost."""
    path = output / "ledger.jsonl"
    if plan is None or not path.exists():
        console.print("[bold]Interrupted.[/]")
        return
    ledger = ledger_so_far(path)
    console.print(
        f"[bold]Interrupted[/] after {ledger.training_rounds} of {plan.rounds} rounds: "
        f"ε = {up(epsilon(ledger, delta, accountant), 4)} at δ = {up(delta, 4)} is spent."
    )
    console.print(f"Ledger up to the last release: {path}", soft_wrap=True)
    if (output / "last.ckpt").exists():
        console.print(f"Go on with: python -m dpexp resume {shlex.quote(str(output))}", soft_wrap=True)
    if ledger.incomplete:
        console.print("[bold red]It has no closing line[/], so that it reads as one that ends early.")


def skipped(place: str) -> None:
    """Says that a trial of a resumed sweep is finished already."""
    _line(place, "finished before")


def trial_ended(place: str, result: dict[str, Any], seconds_left: float | None) -> None:
    """One line of a sweep: what a trial cost and what came out of it."""
    metrics, calibration = result["metrics"], result.get("calibration")
    facts = []
    if "epsilon" in result:
        facts.append(f"ε {up(next(iter(result['epsilon'].values())), 4)}")
    if not result["private"]:
        facts.append("[bold red]not private[/]" if "epsilon" in result else "not private")
    if calibration and not result["trained"]:
        facts.append(f"{calibration['knob']} {calibration['value']:.4g}")
    if "test_accuracy" in metrics:
        facts.append(f"{metrics['test_accuracy']:.1%}")
    facts.append(_duration(result["seconds"]))
    if seconds_left:
        facts.append(f"about {_duration(seconds_left)} left")
    _line(place, *facts)


def trial_failed(place: str, why: str) -> None:
    """One line of a sweep: what ended a trial."""
    _line(place, f"[bold red]FAILED[/]: {escape(why)}")


def _line(place: str, *facts: str) -> None:
    console.print(" · ".join([escape(place), *facts]), highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def swept(frame: Any, failed: Any, best: Any, costs: dict[str, float], sentence: str, address: str) -> None:
    """Prints what came out of a sweep, and what choosing among its trials costs."""
    console.print(f"[bold]Sweep[/]: {len(frame)} trials, {len(frame) - len(failed)} finished.")
    for _, trial in failed.iterrows():
        console.print(f"[bold red]{trial['status']}[/] {trial['name']}: {trial['error'] or 'no reason known'}")
    if best is not None:
        console.print(f"Best: {best['name']}, test accuracy {best['test_accuracy']:.2%}", soft_wrap=True)
    console.print(sentence, soft_wrap=True)
    console.print(f"Compare trials: {address}", soft_wrap=True)


def kept_for_later(folder: Path) -> None:
    """Says that the tracking server was away."""
    console.print(
        f"[bold red]The tracking server could not be reached.[/] What it missed is in {folder} and will be sent when "
        "the next job starts.", soft_wrap=True,
    )  # fmt: skip


def conclude(result: dict[str, Any], output: Path, runs: str | None) -> None:
    """Prints what came out, and where to look at it.

    Args:
        runs: the address of the list of runs.
    """
    metrics = result["metrics"]
    if "test_accuracy" in metrics:
        console.print(f"[bold]Test accuracy {metrics['test_accuracy']:.2%}[/] after {result['seconds']:.0f} s")
    if result.get("released"):
        told = [
            f"{escape(name)} {one['estimate']:.4g}" + (f" ± {one['sd']:.2g}" if one["sd"] else "")
            for name, one in result["released"].items()
        ]
        console.print(f"[bold]Released[/], of the last fifth of the rounds: {', '.join(told)}", soft_wrap=True)
    for name, told in result.get("prepared", {}).items():
        console.print(f"[bold]{name}[/]: {', '.join(f'{number:.0f}' for number in told)}", soft_wrap=True)
    if "epsilon" in result:
        spent = ", ".join(f"{up(value, 4)} by {name}" for name, value in result["epsilon"].items())
        unit = result.get("unit", "record")
        console.print(
            f"[bold](ε, δ)[/]: ε = {spent}, δ = {up(result['delta'], 4)}, {neighbours(result['adjacency'], unit)}",
            soft_wrap=True,
        )
        console.print(f"[bold]In words[/]: {in_words(result['risk'], unit)}", soft_wrap=True)
        if not result["private"]:
            console.print("[bold red]This guarantee does not cover what the run shows; see above.[/]")
    console.print(f"{'Ledger' if result['trained'] else 'Plan'} and result: {output}", soft_wrap=True)
    if runs is not None:
        console.print(f"Compare runs: {runs}", soft_wrap=True)


def audited(audit: Audit) -> None:
    """Prints what an attacker got, beside what was claimed, and what that means."""
    console.print(
        f"[bold]Audit[/]: {audit.canaries} canaries in all rounds, each included by a fair coin; the attacker guesses "
        f"{audit.right / audit.canaries:.1%} of the coins right. μ claimed {up(audit.mu_claimed, 4)}, "
        f"found {audit.mu_estimate:.4g} ± {audit.mu_error:.2g}, at least {audit.mu_bound:.3g}, "
        f"if canaries are independent {audit.mu_bound_if_independent:.3g}",
        soft_wrap=True,
    )
    table = Table("δ", "claimed ε", "ε at least", "if canaries are independent")
    for bound in audit.bounds:
        found = [f"[bold red]{v:.4g}[/]" if v > bound.claimed else f"{v:.4g}" for v in bound[2:]]
        table.add_row(f"{bound.delta:g}", up(bound.claimed, 4), *found)
    console.print(table)
    table = Table("in units of the plan", "planned", "found", "would be found from")
    for check in audit.checks:
        found_one = f"[bold red]{check.found:.4g}[/]" if check.refuted else f"{check.found:.4g}"
        table.add_row(check.name, f"{check.planned:g}", found_one, f"{check.detectable:.3g}")
    console.print(table)
    console.print(
        f"The whole claimed trade-off: p = {audit.p:.2g}, or if canaries are independent {audit.p_independent:.2g}. "
        f"All at {100 * audit.confidence:g}% together; errors in the last column are found with probability "
        f"{POWER:.0%}.", soft_wrap=True,
    )  # fmt: skip
    if not audit.exceeded:
        console.print(
            "Nothing claimed is refuted. That proves no ε: it shows what this attacker got, and another may get more.",
            soft_wrap=True,
        )


def attacked(audit: Membership, trainings: int, delta: float) -> None:
    """Prints what a membership attacker got, beside what was claimed, and what it cost to find out.

    Args:
        trainings: how many the audit took; delta: at which ε of all that was shown is told.
    """
    private = math.isfinite(audit.spent)
    low, high = audit.interval
    allowed = f", {up(100 * audit.share_allowed, 4)}% allowed" if private else ""
    console.print(
        f"[bold]Audit[/]: {audit.coins} coins of mislabelled records; by the losses of final models the attacker "
        f"guesses {audit.right / audit.coins:.1%} right ({low:.1%} to {high:.1%} at {audit.confidence:.0%}{allowed})",
        soft_wrap=True,
    )
    table = Table("", "found", "allowed")
    for name, found, most in (
        ("TPR - FPR", audit.advantage, audit.advantage_allowed), ("TPR at FPR 1 %", audit.tpr, audit.tpr_allowed)
    ):  # fmt: skip
        table.add_row(name, f"{found:.3f}", up(most, 3))
    for bound in audit.bounds:
        least = f"[bold red]{bound.found:.4g}[/]" if bound.found > bound.claimed else f"{bound.found:.4g}"
        table.add_row(f"ε at δ = {bound.delta:g}", f"at least {least}", up(bound.claimed, 4))
    console.print(table)
    if not private:
        console.print("Without privacy nothing is claimed, and what is shown costs any ε.", soft_wrap=True)
        return
    console.print(
        f"The whole claimed trade-off: p = {audit.p:.2g}; with the bounds on ε at {audit.confidence:.0%} together. "
        f"{trainings} more trainings on the data had a part in this: with them, all that this job shows costs ε = "
        f"{up(audit.spent, 4)} at δ = {up(delta, 4)}.",
        soft_wrap=True,
    )
    if not audit.exceeded:
        console.print("Nothing claimed is refuted. That proves no ε: another attacker may get more.", soft_wrap=True)


def attacked_before(summary: dict[str, float]) -> None:
    """Prints that an audit is not repeated."""
    console.print(
        "[bold]Audit[/]: an earlier start of this job has shown it (result.json, audit.png). It is not repeated, since "
        "its trainings on the data would be more releases; with those that were, all that this job shows costs ε = "
        f"{up(summary.get('epsilon_together', math.inf), 4)}.",
        soft_wrap=True,
    )


def measured(metrics: dict[str, float]) -> None:
    """Prints metrics of the test set."""
    for name, value in metrics.items():
        console.print(f"{name}: {value:.2%}" if name.endswith("accuracy") else f"{name}: {value:.4g}")


def plan_json(plan: PrivacyPlan) -> str:
    """The plan as JSON, z included."""
    z = plan.noise_multiplier
    return json.dumps(asdict(plan) | {"noise_multiplier": z if math.isfinite(z) else None}, indent=2)
