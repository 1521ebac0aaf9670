"""Terminal output: the plan, progress, results."""

import itertools
import re
import resource
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from dpexp._lightning_compat import pl
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import POWER, Audit
from dpexp.accounting.calibration import CALIBRATABLE
from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.accounting.rounding import down, up
from dpexp.accounting.sampling import RandomAllocation
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.noise.correlated import max_noise_std
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.plan.schedules import Schedule
from dpexp.privacy.private_metrics import SAMPLE_SIZE, MetricEstimates
from dpexp.reporting.wording import RECALL, before_training, guarantee_in_words, range_of

console = Console()
_MAX_NAMES = 8  # of parameters
_MAX_RECALLS = 5  # classes
_MANY_CLASSES = 20  # from which on no recalls are measured
_SKILL = 0.1  # of the way from chance to a perfect score, from which on a model is said to have learnt


def _print(text: str) -> None:
    console.print(text, soft_wrap=True)


def print_plan(plan: PrivacyPlan | None, delta: float, instead_of: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Prints the plan as a table, notes on it, and warnings.

    Args:
        delta: the δ at which ε is stated.
        instead_of: the configured values that calibration replaced, by key.
    """
    if plan is None:
        console.print("[bold]Not private:[/] privacy.enabled=false.")
        return
    _print(_first_line(plan))
    if plan.calibration is not None:
        _print(escape(_solved_line(plan, instead_of)))
    for line in before_training(plan, delta):
        _print(line)
    console.print(plan_table(plan))
    scales = [{*group.alphas} for group in plan.groups if not group.is_metric]
    equal_scales = bool(scales) and {1.0} not in scales and all(len(own) == 1 for own in scales)
    if equal_scales and plan.adaptive is None:
        _print("With equal scales α_j, as here, joint clipping is separate clipping; alpha=adaptive learns the scales.")
    for text in notes:
        _print(text)
    _print_warnings(plan, delta)
    if plan.part is not None:
        _print(f"Only training records of {escape(str(plan.part))} are used.")


def _first_line(plan: PrivacyPlan) -> str:
    """The rounds of a plan, how their samples are drawn, and whatever else all rounds have in common."""
    policy, solved = plan.sampling, plan.calibration
    facts = [
        f"[bold]Plan[/]: {plan.rounds} rounds, each on about {policy.q * plan.n:.0f} of n = {plan.n} "
        f"{plan.privacy_unit.plural} (sampling {policy.name}, q = {policy.q:.5g})"
    ]
    is_said_below = solved and (CALIBRATABLE[solved.knob].held or solved.knob == "noise_multiplier")
    if not is_said_below:
        facts.append(f"z = {plan.noise_multiplier:.4g}")
    # The last sample of an epoch is smaller if the records do not divide into equal samples.
    last = policy.at_round(int(policy.rounds_per_epoch) - 1, plan.n)
    if last.weight < 1:
        facts.append(f"{last.rounds_per_epoch} samples an epoch")
        facts.append(
            f"the last of {last.q * plan.n:.0f} (its sums are divided by that, its step is multiplied by "
            f"{last.weight:.3g})"
        )
    if isinstance(policy, RandomAllocation):
        facts.append(_random_allocation(policy, plan.rounds))
    if plan.schedule != Schedule():
        facts.append("on a schedule")
    if len(plan.bands) > 1:
        facts.append(f"noise correlated over {len(plan.bands)} rounds")
    if plan.clip_rules:
        facts.append(f"clip {plan.clip_rules}")
    return ", ".join(facts)


def _random_allocation(policy: RandomAllocation, rounds: int) -> str:
    """What the policy means for a plan: an epoch is charged as a whole."""
    rest = rounds % policy.rounds_per_epoch
    last = f" (the last one, too, of only {rest} rounds)" if rest else ""
    return (
        f"each record in {policy.num_selected} of an epoch's {policy.rounds_per_epoch} rounds; an epoch{last} "
        "costs all of its ε from its first round on, and a resumed job begins a new one"
    )


def _solved_line(plan: PrivacyPlan, instead_of: Mapping[str, Any]) -> str:
    """The calibrated parameter and its cost; if something else was held, the plan that follows."""
    solved = plan.calibration
    assert solved is not None
    spent = ", ".join(f"{name} = {up(figure, 4)}" for name, figure in solved.figures)
    knob = solved.knob.removesuffix("_at_fixed_noise")
    line = f"Solved for {knob} = {solved.value:.6g}, which costs {spent}{solved.missed}"
    held = CALIBRATABLE[solved.knob].held
    if not held:
        return line
    replaced = ", ".join(f"{key}={value}" for key, value in instead_of.items())
    return (
        f"{line}: with {held} held, q = {plan.sampling.q:.5g}, z = {plan.noise_multiplier:.4g}, T = {plan.rounds} "
        f"in place of {replaced}"
    )


def _print_warnings(plan: PrivacyPlan, delta: float) -> None:
    """Warns of a δ that protects nobody, and of a noise in which nothing can be learnt."""
    if delta >= 1 / plan.n:
        console.print(
            f"[bold red]privacy.delta={up(delta, 4)} is not below 1/n = {1 / plan.n:.2g}[/]: such a δ "
            f"allows publishing one random {plan.privacy_unit} in full. Well below 1/n is usual."
        )
    if (ratio := plan.noise_ratio) > 1:  # on digits and texts, little was learnt then
        _print(
            f"[bold red]Noise drowns the gradients[/]: over all {plan.rounds} rounds it is {ratio:.2g} times as long "
            "as clipped gradients can be. More records in a round, a larger ε or fewer trained weights help."
        )


def print_check(step: str, seconds: float, rounds: int) -> None:
    """Prints what a job that was only checked will take.

    Args:
        step: how each record's step is carried out.
        seconds: of a round; 0 if unknown.
    """
    total = timedelta(seconds=round(seconds * rounds))
    takes = f"{rounds} rounds of {1e3 * seconds:.3g} ms take about {total} (h:mm:ss)" if seconds else f"{rounds} rounds"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    _print(f"Checked: each record's step is {step}; {takes}; {memory:.1f} GiB of memory so far. Nothing was released.")


def print_trained_parameters(module: pl.LightningModule) -> None:
    """Prints the names of the trained parameters, if some are frozen.

    Of many, it prints how many there are of each name, in which * stands for a number.
    """
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in module.parameters())
    if 0 < sum(sizes.values()) < total:
        shown = [*sizes]
        if len(sizes) > _MAX_NAMES:
            kinds = Counter(re.sub(r"\b\d+\b", "*", name) for name in sizes)
            shown = [f"{count} × {kind}" for kind, count in kinds.items()]
        _print(f"[bold]Trained[/]: {sum(sizes.values()):,} of {total:,} weights: {escape(', '.join(shown))}")


def plan_table(plan: PrivacyPlan) -> Table:
    """A table with one row per group.

    The column α_j is left out if all scales are 1. The last column has the noise per coordinate of what is released: of
    an average it is α_j σ̃_g/(qn), and more if the noise is correlated over rounds; of the sample's size it is σ̃_g.
    """
    scaled = any(alpha != 1 for group in plan.groups for alpha in group.alphas)
    names = ["vectors", "d_g", *(["α_j"] if scaled else []), "S_g", "σ̃_g", "share", "noise per coordinate"]
    table = Table(Column("group", overflow="fold"), *names)
    for group in plan.groups:
        name = group.name
        if group.every_n_rounds > 1:
            name += f", every {group.every_n_rounds} rounds"
        divisor = 1 if group.name == SAMPLE_SIZE else plan.sampling.q * plan.n
        noises = [alpha * max_noise_std(group.sigma, group.bands) / divisor for alpha in group.alphas]
        table.add_row(
            name,
            str(len(group.vectors)),
            f"{group.d:,}",
            *([range_of(group.alphas, 3)] if scaled else []),
            f"{group.S:.4g}",
            f"{group.sigma:.4g}",
            f"{group.share:.3f}",
            range_of(noises, 3),
        )
    return table


class RoundBar(pl.callbacks.ProgressBar):
    """Progress bar: rounds done, an upper bound on ε, and rounds per second.

    Args:
        place: that of a trial in its sweep, in words; None for a single job.
    """

    is_enabled = False  # to print texts of a module, for which Lightning would ask it

    def __init__(self, rounds: int, privacy: PrivacyCallback | None, place: str | None = None) -> None:
        super().__init__()
        self._rounds = rounds
        self._place = place
        self._privacy = privacy
        self.purpose = ""  # shown in place of ε and private metrics
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = Progress(
            TextColumn("{task.description}round {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            transient=self._place is not None,
            disable=self._place is not None and not console.is_terminal,
        )
        place = f"{escape(self._place)} " if self._place else ""
        self._task = self._progress.add_task(place, total=self._rounds, shown="")
        self._progress.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._progress is None:
            return
        task = self._progress.tasks[0]
        if task.completed == 0 and self._privacy and self._privacy.progress.why_compiled and self._place is None:
            _print(f"The step is {self._privacy.progress.why_compiled}.")
        spent = "not private"
        if self._privacy:
            readings = self._privacy.readings
            spent = f"ε ≤ {up(readings.at_most, 4)}" if readings else ""
        shown = [self.purpose or spent]
        if self._privacy and not self.purpose:
            shown.append(", ".join(_released(self._privacy.estimates)))
        if task.speed:
            shown.append(f"{task.speed:.1f} rounds/s")
        self._progress.update(self._task, completed=trainer.global_step, shown=" ".join(filter(None, shown)))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _released(estimates: MetricEstimates) -> Iterator[str]:
    """The first three values that are released beside gradients, as means of recent rounds, each with its noise."""
    for name in itertools.islice(estimates.history, 3):
        value, sd = estimates.moving_average(name)
        yield f"{escape(name)} {value:.3g}" + (f" ± {sd:.1g}" if sd else "")


def print_resumed(
    plan: PrivacyPlan, output: Path, delta: float, accountant: str, done: int, at_end: Ledger | None
) -> None:  # fmt: skip
    """Prints after how many rounds a job goes on, and the ε of its ledger.

    Its ε at the end is printed, too, if it is larger than the plan's: lost rounds are done again.
    """
    spent = epsilon(ledger_so_far(output / "ledger.jsonl"), delta, accountant)
    _print(f"[bold]Resuming[/] at round {done} of {plan.rounds}, ε = {up(spent, 4)} spent at δ = {up(delta, 4)}")
    if at_end and (most := epsilon(at_end, delta, accountant)) > epsilon(plan.ledger(), delta, accountant):
        again = at_end.training_rounds - plan.rounds
        if again > 0:
            why = f"{again} rounds after the checkpoint were released, and are lost: they are done again"
        else:
            why = "The interrupted epoch or block counts as a whole"
        _print(f"{why}, so the job will end at ε ≤ {up(most, 4)}. checkpoint.every_n_rounds bounds how much is lost.")


def print_interrupted(plan: PrivacyPlan | None, output: Path, delta: float, accountant: str) -> None:
    """Prints how far an interrupted run came, its ε, and how to resume it."""
    path = output / "ledger.jsonl"
    if plan is None or not path.exists():
        console.print("[bold]Interrupted.[/]")
        return
    ledger = ledger_so_far(path)
    console.print(
        f"[bold]Interrupted[/] after {ledger.training_rounds} of {plan.rounds} rounds: "
        f"ε = {up(epsilon(ledger, delta, accountant), 4)} at δ = {up(delta, 4)} is spent."
    )
    _print(f"Ledger up to the last release: {path}")
    if (output / "last.ckpt").exists():
        _print(f"Resume with: python -m dpexp resume {shlex.quote(str(output))}")
    if ledger.incomplete:
        console.print("[bold red]It has no closing line[/], so it reads as one that ends early.")


def print_trial(place: str, result: dict[str, Any]) -> None:
    """Prints one line with a trial's cost and result."""
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
    facts.append(str(timedelta(seconds=round(result["seconds"]))))
    print_line(place, *facts)


def print_line(place: str, *facts: str) -> None:
    """Prints facts on a trial in one line."""
    console.print(" · ".join([escape(place), *facts]), highlight=False, soft_wrap=True)


def print_sweep(summary: Any, lines: Sequence[str], output: Path) -> None:
    """Prints the results of a sweep.

    Args:
        summary: a table with a row of texts for each configuration.
        lines: on its trials, the best ones, and what choosing among them costs.
        output: its folder.
    """
    if len(summary):
        table = Table(*(Column(name, overflow="fold") for name in summary.columns))
        for row in summary.to_numpy():
            table.add_row(*map(escape, row))
        console.print(table)
    for line in lines:
        _print(escape(line))
    print_sweep_folder(output)


def print_sweep_folder(output: Path) -> None:
    """Prints a sweep's folder, its tables and figures, and the command that makes a page of them."""
    names = sorted(path.name for path in output.iterdir() if path.suffix in (".csv", ".png"))
    _print(escape(f"Folder: {output}: {', '.join(names) or 'a folder for each trial'}"))
    _print(escape(f"On one page: python -m dpexp report {shlex.quote(str(output))}"))


def print_missed(reason: str, output: Path) -> None:
    """Prints that the tracking server lacks some of a run."""
    _print(
        f"[bold red]The tracking server lacks some of this run[/]: {escape(reason[:200])}. Its folder has all "
        f"of it; once the server is there again: python -m dpexp mirror {shlex.quote(str(output))}"
    )


def print_result(result: dict[str, Any], output: Path, runs: str | None, weighted: bool) -> None:
    """Prints the result of a job, and where its files are.

    Args:
        runs: the address of the list of runs.
        weighted: whether classes were weighted.
    """
    if result["metrics"]:
        print_tested(result["metrics"], result.get("class_names"), weighted, f" after {result['seconds']:.0f} s")
    if result.get("released"):
        values = [
            f"{escape(name)} {one['estimate']:.4g}" + (f" ± {one['sd']:.2g}" if one["sd"] else "")
            for name, one in result["released"].items()
        ]
        _print(f"[bold]Released[/], of the last fifth of the rounds: {', '.join(values)}")
    for name, entries in result.get("preprocessing", {}).items():
        _print(f"[bold]{name}[/]: {', '.join(f'{entry:.0f}' for entry in entries)}")
    if "epsilon" in result:
        guarantee, words, likewise = guarantee_in_words(result)
        _print(f"[bold](ε, δ)[/]: {guarantee}\n[bold]In words[/]: {words}\n{likewise}")
        if not result["private"]:
            console.print("[bold red]This guarantee does not cover what the run shows; see above.[/]")
    _print(f"{'Ledger' if result['trained'] else 'Plan'} and result: {output}")
    if runs is not None:
        _print(f"Compare runs: {runs}")


def print_tested(
    metrics: dict[str, float], class_names: Sequence[str] | None, weighted: bool = False, after: str = ""
) -> None:
    """Prints what the test set shows, and what always giving its most frequent class would reach.

    Args:
        class_names: of a classifier's classes; None: they are numbers.
        weighted: whether classes were weighted already, so that it is no advice to weigh them.
        after: words on how long the training took.
    """
    if "test_accuracy" in metrics:
        accuracy, majority = metrics["test_accuracy"], metrics.get("test_majority_accuracy")
        beside = "" if majority is None else f"; always its most frequent class: {majority:.2%}"
        _print(f"[bold]Test accuracy {accuracy:.2%}[/]{after}{beside}")
        if majority is None:
            return
        of_classes = _in_words(recalls := _recalls(metrics, class_names))
        _print(f"Balanced accuracy {metrics['test_balanced_accuracy']:.2%}, AUC {metrics['test_auc']:.3f}{of_classes}")
        if accuracy <= majority:
            _print_failure(metrics, recalls, weighted)
    elif "test_perplexity" in metrics:
        unigram = metrics.get("test_unigram_perplexity")
        beside = "" if unigram is None else f"; always the frequencies of its tokens: {unigram:.4g}"
        _print(f"[bold]Test perplexity {metrics['test_perplexity']:.4g}[/]{after}{beside}")
    elif "test_r2" in metrics:
        _print(f"[bold]Test R² {metrics['test_r2']:.3f}[/]{after}; always the mean of its targets: 0")


def _print_failure(metrics: dict[str, float], recalls: dict[str, float], weighted: bool) -> None:
    """Prints what is wrong with a classifier that is no more accurate than always giving the most frequent class.

    It may have learnt nonetheless: two classes are judged by AUC, more by the balanced accuracy.
    """
    auc, chance = metrics["test_auc"], 1 / (len(recalls) or _MANY_CLASSES)
    reached = auc if len(recalls) == 2 else metrics["test_balanced_accuracy"]
    if reached <= chance + _SKILL * (1 - chance):
        _print(
            "[bold red]The model is no better than always giving the most frequent class.[/] More records, a larger "
            "privacy.epsilon or a model with fewer weights would help; if classes are rare, data.class_weights."
        )
    elif len(recalls) == 2 and not weighted:
        missed = min(recalls, key=recalls.__getitem__)
        found = f"{recalls[missed]:.1%}" if recalls[missed] else "none"
        _print(
            f"[bold]It ranks the classes (AUC {auc:.2f}; chance is 0.5), but at the threshold 0.5 it finds {found} of "
            f"{escape(missed)}[/]: give public data.class_weights, as \\[1, 10], or =counts with "
            "preprocessing=\\[class_counts], or choose a threshold on test rows."
        )


def _recalls(metrics: dict[str, float], class_names: Sequence[str] | None) -> dict[str, float]:
    """The recall of each class by its name; empty if there are too many classes."""
    recalls = {name.removeprefix(RECALL): value for name, value in metrics.items()}
    return {class_names[int(k)] if class_names else k: value for k, value in recalls.items() if k.isdecimal()}


def _in_words(recalls: dict[str, float]) -> str:
    """The recall of each class; of many, the lowest."""
    lowest = sorted(recalls, key=recalls.__getitem__)[:_MAX_RECALLS]
    few = len(lowest) == len(recalls)
    shown = [f"{name} {recalls[name]:.1%}" for name in (recalls if few else lowest)]
    return f"; {'recall' if few else 'lowest recall'}: {escape(', '.join(shown))}" if shown else ""


def print_audit(audit: Audit, claimed: float, delta: float) -> None:
    """Prints the results of an audit: what the job claims, what is attacked and why, and what the attack has shown.

    A canary is a record that the audit adds. Its gradient lies in coordinates of its own, so that the released sums
    show it as clearly as they can show a record. A coin decides whether it is included. An attacker who guesses more
    coins right than ε allows refutes the claim.
    """
    at = next(bound for bound in audit.bounds if bound.delta == delta)
    _print(
        f"The job claims ε = {up(claimed, 4)} at δ = {up(delta, 4)}. Its noise is attacked in rounds of all "
        f"records, for which ε = {up(at.claimed, 4)} would be claimed: sampling, which is tested by itself, would hide "
        "most of what a canary shows."
    )
    _print(
        f"[bold]Audit[/]: {audit.canaries} canaries in all rounds, each included with probability 1/2; the attacker "
        f"guesses {audit.right / audit.canaries:.1%} of these coins right. μ claimed {up(audit.mu_claimed, 4)}, at "
        f"least {down(audit.mu_bound, 3)}"
    )
    table = Table("δ", "ε of the attacked rounds", "at least")
    for bound in audit.bounds:
        found = _marked(down(bound.found, 4), audit.mu_bound > audit.mu_claimed)
        table.add_row(up(bound.delta, 4), up(bound.claimed, 4), found)
    console.print(table)
    table = Table("in units of the plan", "planned", "found", "detectable from")
    for check in audit.checks:
        measured = _marked(f"{check.found:.4g}", check.refuted)
        table.add_row(check.name, f"{check.planned:.4g}", measured, f"{check.detectable:.4g}")
    console.print(table)
    _print(
        f"All at {100 * audit.confidence:g}% together; errors in the last column are found with probability "
        f"{POWER:.0%}."
    )
    if not audit.exceeded:
        _print("No claim is refuted. That proves no ε: another attacker may get more.")


def _marked(value: str, refuted: bool) -> str:
    return f"[bold red]{value}[/]" if refuted else value
