"""Would the tests notice? Faults are put into a copy of the code, one at a time, and the tests are run on it.

    python benchmarks/faults.py [--all] [NUMBER OR PART OF A NAME ...]

Each fault is a small change of one place that a guarantee rests on, with the test files that are expected to catch it.
What is printed is by which test each was caught first. With `--all` the whole suite is run on each, which takes hours.
The exit status is the number of faults that no test caught.
"""

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("dpexp", "conf", "sweeps", "tests", "docs", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md",
          "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "mkdocs.yml", "constraints.txt")  # fmt: skip


SLOW_TO_IMPORT = ("torch", "pytorch_lightning", "mlflow.store.tracking.sqlalchemy_store", "hypothesis", "scipy.stats",
                  "dp_accounting", "matplotlib.pyplot", "sklearn.datasets", "torch._dynamo")  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """`changes` of a file of dpexp/, (what stands there once, what takes its place); `tests`: files of tests/, and
    after -k which of their tests."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: str


def fault(name: str, file: str, old: str, new: str, tests: str) -> Fault:
    return Fault(name, file, ((old, new),), tests)


NOISE, ENGINE = "privacy/noise/continuous.py", "privacy/round.py"
MECHANISM, PLAN, TRAINING = "privacy/mechanism.py", "privacy/plan/plan.py", "privacy/training.py"
ROUNDING, WRITING, EVENTS = "privacy/gradients/norms.py", "accounting/ledger/writer.py", "accounting/ledger/events.py"
PREPARING, CLAIMS = "privacy/preprocessing.py", "accounting/releases.py"
BUDGET = "tracking/data_budget.py"
POLICY, SHUFFLE, ALLOCATION, CYCLIC, FIXED, TRUNCATED = (
    f"accounting/sampling/{name}.py"
    for name in ("policy", "shuffle", "random_allocation", "cyclic_poisson", "fixed_size", "truncated_poisson")
)
OPTIONS, RELEASES = "privacy/plan/options.py", "accounting/releases.py"
TRACE, COPY, FACTORS, LIFTED, LAYERS, GRAPH, GRAPHS, STEP, ALONE, RECURRENT, COMPILED = (
    f"privacy/gradients/{name}.py"
    for name in ("one_record", "module_copy", "factors", "lifted", "layer_gradients", "graph", "graphs", "step",
                 "one_at_a_time", "recurrent", "compiled")
)  # fmt: skip

FAULTS = [
    # Noise
    fault("noise in which nothing can be learnt is not said", "privacy/refusals.py",
          "plan.noise_multiplier > plan.sampling.q * plan.n", "plan.noise_multiplier > 1000 * plan.sampling.q * plan.n",
          "private -k can_be_learnt"),
    fault("half the noise of small tensors", NOISE, "mul_(sigma).add_(total)", "mul_(sigma / 2).add_(total)",
        "continuous"),
    fault("half the noise of large tensors", NOISE, "normal(words, sigma / divisor)",
          "normal(words, sigma / 2 / divisor)", "continuous"),
    fault("both numbers of a pair are the same", NOISE, "torch.sin(angle, out=sin)", "torch.cos(angle, out=sin)",
          "continuous"),
    fault("float32 uniforms", NOISE, "radius.add_(0.5).mul_(2.0**-63)",
          "radius.add_(0.5).mul_(2.0**-63).clamp_(min=2.0**-24)", "continuous"),
    fault("a large tensor's parts have the same noise", "privacy/noise/randomness.py", "first.to_bytes(4, ",
          "(0).to_bytes(4, ", "continuous"),
    fault("the key stream begins anew with each use", "privacy/noise/randomness.py",
          "return next(self._numbers).to_bytes",
          "return (0).to_bytes", "continuous"),
    fault("every run has the same key", "privacy/noise/randomness.py", "secrets.token_bytes(32)", "bytes(32)",
          "continuous -k twice"),
    fault("a resumed run with a seed begins its streams anew", "privacy/noise/randomness.py",
          "known(seed, purpose, rounds)", "known(seed, purpose, 0)", "callback -k known_seed"),
    fault("noise without its scale α", MECHANISM, "alpha * group.sigma, group.bands", "group.sigma, group.bands",
          "callback -k by_hand"),
    fault("correlated noise with the wrong sign", NOISE, "z.sub_(y, alpha=c_j)", "z.add_(y, alpha=c_j)",
          "correlated -k law"),
    fault("Laplace noise of half the scale", NOISE, "alpha=b)", "alpha=b / 2)", "preprocessing -k noise"),
    fault("class counts without noise", PREPARING, "add_laplace([(total, event.scale)], noise)", "pass",
          "preprocessing -k noise"),
    fault("Gaussian preparations without noise", PREPARING, "GaussianNoise(noise).add_to([(total, event.scale)])",
          "pass",
          "preprocessing -k noise"),
    # What one record adds
    fault("twice the bound in clip factors", MECHANISM, "bound = S.clamp(max=LARGEST[dtype])",
          "bound = 2 * S.clamp(max=LARGEST[dtype])", "clip_rules -k more_than_s"),
    fault("twice the bound in the usual rule", "privacy/plan/clipping.py", "return (S / x).clamp(max=1)",
          "return (2 * S / x).clamp(max=1)", "clip_rules -k formulas"),
    fault("nothing is taken from S for rounding", MECHANISM, "dtype: 3.001 * unit + 2.001 * 2.0**-53",
          "dtype: 0.0", "clip_rules -k taken_from_s"),
    fault("norms are not enlarged for rounding", ROUNDING, "rounding, lost = (d + 2) * 2.0**-53,",
          "rounding, lost = 0.0,", "norms -k 'contributes or enlarged'"),
    fault("norms of large vectors are not enlarged", ROUNDING, "(RUN + 2) / 2 * UNIT[dtype] + d * 2.0**-53", "0.0",
          "norms -k 'large_layers or enlarged'"),
    fault("what underflows has no part in a norm", ROUNDING, "together + d**0.5 * lost if lost else together",
          "together",
          "norms -k underflow"),
    fault("Gram matrices without their error", ROUNDING,
          "squared = _at_least_zero(total) + _SLACK * error + T**2 * lost\n    added = T",
          "squared = _at_least_zero(total)\n    added = 0 * T", "norms factors -k 'contributes or cancelling'"),
    fault("scales are left out of the norm", MECHANISM, "_over_square(one, part.alpha)", "_over_square(one, 1.0)",
          "clipped_sums -k float64_equals"),
    fault("a parameter's uses are clipped without cross terms", "privacy/gradients/layer_gradients.py",
          "index[:, :, None] == self.index[:, None, :], self.g)",
          "index[:, :, None] == torch.arange(self.index.shape[1]), self.g)",
          "norms factors -k 'contributes or embeddings'"),
    fault("infinite records are counted", "privacy/gradients/clipped_sums.py", "sum(others, first) < torch.inf}",
          "first == first}", "clipped_sums -k odd_record"),
    fault("padding counts as records", "privacy/gradients/graphs.py", "counted, padded = index < chunk.size",
          "counted, padded = index >= 0", "one_record -k padding_adds"),
    fault("labels out of range count", "privacy/gradients/clipped_sums.py", "counted & gradients.in_range", "counted",
          "clipped_sums -k odd_record"),
    fault("no graph is proved", "privacy/gradients/graph.py", "    if size == 1:\n        return\n", "    return\n",
          "one_record -k by_the_proof"),
    fault("a changed weight is not looked for", "privacy/gradients/one_at_a_time.py", "if now.get(name) != was:",
          "if False:", "contract -k clamped"),
    fault("a record's loss after others is not looked at", "privacy/gradients/one_at_a_time.py",
          "        if _differ(before, after, again):", "        if False:",
          "records_apart -k keeps_something"),
    fault("statistics for standardizing are not clipped", PREPARING,
          "c = clip_factors(Abadi(), norms, ", "c = clip_factors(Abadi(), norms.clamp(max=1e-3), ",
          "preprocessing -k one_record_more"),
    fault("a user trains on all examples", "privacy/sampling/privacy_unit.py",
          "permutation(m)[: self._max_examples].tolist()", "permutation(m).tolist()",
          "privacy_unit -k random_part"),
    # The gradient of a record: trace and copy
    fault("what a step keeps is not looked at", "privacy/state_checks.py", "if buffers or (kept and is_read):",
          "if False:",
          "contract -k queue"),
    fault("an error that the step catches is not seen", TRACE, "mode.error is not None or ", "",
          "steps -k caught"),
    fault("a number that the step catches is not seen", "privacy/gradients/branches.py",
          "        DataDependent.raised += 1", "        pass", "steps -k number"),
    fault("Python's generator is not looked at", TRACE, "if python_random_states() != python_random:", "if False:",
          "steps -k generator"),
    fault("memory is not filled", "privacy/gradients/operators.py", "    _initialise(graph)\n\n\n_OVER", "\n\n_OVER",
          "ordinary_steps -k memory"),
    fault("a parameter outside the plan may be trained", "privacy/gradients/per_example.py",
          "leaf.numel() and id(leaf) not in known", "False", "records_apart -k releases"),
    fault("a step may seed", "privacy/gradients/per_example.py",
          'patch.object(torch, "manual_seed", _refuse_seed), ', "",
          "records_apart -k seed"),
    fault("a copy shares buffers", COPY, "lambda t: t if id(t) in parameters else _clone(t))", "lambda t: t)",
          "contract -k losses"),
    fault("a copy shares lists", COPY, "(np.ndarray,) if tensor else ()", "(np.ndarray, list) if tensor else (list,)",
          "contract -k list"),
    fault("all records have one module", "privacy/gradients/training_step.py", "own = StandIn(self, module, owner)",
          "own = StandIn(self, self.module, self.owner)", "contract -k untraced"),
    fault("the copy's loggers log", COPY, "return pl.loggers.logger.DummyLogger()", "return value",
          "contract -k loggers"),
    fault("changes in containers are not seen", COPY, "_MAX_DEPTH, _MAX_ENTRIES = 4, 1000",
          "_MAX_DEPTH, _MAX_ENTRIES = 0, 1000", "contract -k list"),
    fault("a copy shares arrays", COPY, "(np.ndarray,) if tensor else ()", "(np.ndarray,)", "contract -k array"),
    fault("a step reads the Trainer's data", COPY, "        raise ConfigError(_REFUSED.format(",
          "        return value\n        raise ConfigError(_REFUSED.format(",
          "contract -k data"),
    fault("classes share their data", COPY, "setattr(kind, name, _copied(value, known))", "pass",
          "left_behind -k everywhere"),
    fault("what is set on a class stays", COPY, "                    setattr(kind, name, held[name])",
          "                    pass",
          "left_behind -k everywhere"),
    fault("a submodule that cannot be copied whole is shared", COPY, ' if item[0] != "_modules"]', "]", "left_behind"),
    fault("a step sets the optimizer's rate", COPY, "    groups, defaults = copy.deepcopy((groups",
          "    return optimizer\n    groups, defaults = copy.deepcopy((groups", "left_behind -k everywhere"),
    fault("a step logs by its owner", "privacy/gradients/training_step.py",
          '(("log", partial(log_privately, self.step.logged)), ', "(",
          "left_behind -k everywhere"),
    fault("another loss function is not looked at", STEP, "is_other = bool(changed(self._read, read))",
          "is_other = False",
          "left_behind -k function"),
    fault("other shapes keep the step that was", STEP,
          "self._graphs, self._refused = {chunk.key: self._usual_shape}, {}",
          "pass", "one_record -k all_shapes"),
    # Factors
    fault("rows of padding count", FACTORS, "torch.where((index == padding)[..., None], 0, g)", "g",
          "factors -k padding"),
    fault("rows from the end are others", FACTORS, "index = torch.where(index < 0, index + shape[0], index)", "pass",
          "factors -k end"),
    fault("a sum that overflows below zero is a norm of zero", ROUNDING,
          "torch.where(total > -torch.inf, total.clamp(min=0), torch.inf)", "total.clamp(min=0)",
          "norms -k below_zero"),
    fault("the uses of a tied table have no inner product", ROUNDING, "squares + 2 * (inner + _SLACK * error)",
          "squares", "factors -k tied"),
    fault("tied tables without the error of their inner product", ROUNDING,
          "_at_least_zero(squares + 2 * (inner + _SLACK * error))\n    return _or_infinite(total.sqrt() + _SLACK",
          "_at_least_zero(squares + 2 * inner)\n    return _or_infinite(total.sqrt() + 0", "factors -k cancel"),
    fault("what was written between two reads is not seen", "privacy/gradients/graph_passes.py",
          " and not reads_changing:", ":", "graph_passes"),
    fault("equal random numbers are drawn once", "privacy/gradients/graph_passes.py", " and not is_random(node)", "",
          "graph_passes"),
    fault("windows of images are padded the other way", FACTORS, "for one in reversed(padding)", "for one in padding",
          "factors -k 'each_method or windows'"),
    fault("blocks of rows begin too early", LAYERS, "total[start:end]", "total[: end - start]", "layers -k across"),
    fault("a second use is forgotten", LAYERS, "    if len(gradients) == 1:\n", "    if gradients:\n",
          "factors -k 'twice or weight'"),
    fault("terms of a convolution are not counted", LAYERS,
          "length = (x_squared * g_squared * self._kernel).sqrt()", "length = 0.0", "norms -k contributes"),
    fault("strips of a Gram matrix count once", ROUNDING, ".sum(2), alpha=2)", ".sum(2), alpha=1)",
          "norms factors -k 'gram or method'"),
    fault("norms follow autocast", ROUNDING, "torch.autocast(device.type, enabled=False)",
          "torch.autocast(device.type, enabled=True)", "half_precision clipped_sums -k 'of_a_step or autocast'"),
    # Lifting
    fault("numbers are drawn once for all records", LIFTED, "ignores = getattr(node",
          "ignores = False and getattr(node", "ordinary_steps -k own"),
    fault("an index may be one too large", LIFTED, "else aten.lt.Scalar", "else aten.le.Scalar",
          "ordinary_steps -k out_of_range"),
    fault("an index may be any negative", LIFTED, "(index, -size, size, None)", "(index, -2 * size, size, None)",
          "ordinary_steps -k out_of_range"),
    fault("a column is looked up among rows", LIFTED, "shape_of(table)[dim] if", "shape_of(table)[0] if",
          "ordinary_steps -k out_of_range"),
    fault("an ignored label is out of range", LIFTED, "shape_of(x)[-1], ignored)]", "shape_of(x)[-1], None)]",
          "ordinary_steps -k out_of_range"),
    fault("operators that vmap gets wrong are used", LIFTED, "if name in _WRONG or", "if", "one_record -k wrong"),
    fault("sums over joined records", LIFTED, "[*args[-1]] != [True, False, False]", "False", "factors -k 'group'"),
    fault("a mask of attention is joined the other way", LIFTED, "if shared and a.shape[1] == 1:",
          "if a.shape[1] == 1:", "layers -k masked"),
    # Proof, graphs and templates
    fault("factors are not compared", GRAPH, "if bool((_norms(factored - gradient)",
          "if False and bool((_norms(factored - gradient)", "one_record -k by_the_proof"),
    fault("lifted gradients are not compared", GRAPH, "range(0 if one.draws else records.size)", "range(0)",
          "one_record -k by_the_proof"),
    fault("a proof without NaN", GRAPH, "(size // 2, _NAN)", "(size // 2, _ZERO)", "one_record -k by_the_proof"),
    fault("a template that does not grow", GRAPH, "values[i] // self.rows * rows", "values[i] // self.rows * self.rows",
          "one_record -k another_size"),
    fault("a row that is not finite is not replaced", GRAPHS, "padded.rows(torch.where(finite, index, good))", "padded",
          "clipped_sums -k odd_record"),
    fault("a step that has changed unseen", STEP, "        if difference(usual.one, self._trace(replace(",
          "        if False and difference(usual.one, self._trace(replace(",
          "one_record -k unseen"),
    fault("training data are constants", STEP, "self._data.refuse(one.constants.items())", "pass",
          "one_record -k training_data"),
    fault("a signal is handled within a trace", "privacy/gradients/per_example.py",
          "if threading.current_thread() is not threading.main_thread():", "if True:", "odd_records -k signal"),
    fault("records of other shapes draw the user's random numbers", "privacy/fit.py",
          "(samples.only_rows and samples.of_examples)", "samples.only_rows",
          "odd_records -k elsewhere"),
    # One at a time, local training, recurrent layers
    fault("a batch is not copied", "privacy/gradients/chunk.py",
          "some = [copied(leaf[i] if isinstance(leaf, Tensor) else leaf) for",
          "some = [leaf[i] if isinstance(leaf, Tensor) else leaf for", "steps records_apart -k 'batch or memory'"),
    fault("labels of CTC are not looked at", "privacy/gradients/per_example.py", "            _check_targets(",
          "            (lambda *_, **__: 0)(", "one_record -k outside_the_table"),
    fault("local training may use a parameter itself", ALONE, "if any(p.grad is not None for",
          "if False and any(p.grad is not None for", "local_training -k refused"),
    fault("each local step begins anew", ALONE,
          "weights = {name: w.detach().requires_grad_() for name, w in weights.items()}",
          "weights = {name: p.detach().clone().requires_grad_() for name, p in self._parameters.items()}",
          "local_training"),
    fault("a reset gate without its gradient", RECURRENT, "torch.mul(d_n, r, out=d_s_n)", "d_s_n.copy_(d_n)",
          "recurrent -k gru"),
    fault("a layer backwards is one forwards", RECURRENT, "range(len(p))[:: -1 if reverse else 1]", "range(len(p))",
          "recurrent -k ways"),
    # Compiled graphs
    fault("what is marked is computed twice", COMPILED, "marked = materialise(x)", "return x", "compiled -k once"),
    fault("compiled code of any layout", COMPILED, "return [*map(_layout, inputs)] == self._layouts", "return True",
          "compiled -k any_size"),
    fault("compiled code that ends the process", GRAPH,
          '        except Exception as error:\n            raise NotTraceable("some records raise',
          '        except KeyError as error:\n            raise NotTraceable("some records raise',
          "compiled -k raises"),
    # Sampling
    fault("a tenth more records", POLICY, "lt(int(q * 2**63))", "lt(min(2**63 - 1, int(1.1 * q * 2**63)))",
          "policies"),
    fault("a truncated sample keeps its first records", TRUNCATED, "kept = stream.permutation(len(sample))",
          "kept = range(len(sample))", "policies"),
    fault("a record too many in samples of fixed size", FIXED, "[: whole_batch(self.q, size)]",
          "[: whole_batch(self.q, size) + 1]", "policies"),
    fault("shuffled batches overlap", SHUFFLE, "order[k * batch : (k + 1) * batch]",
          "order[k * batch : (k + 1) * batch + 1]", "policies"),
    fault("an epoch leaves its rest out", SHUFFLE, "math.ceil(self.weight / self.q * (1 - 1e-12))",
          "math.floor(self.weight / self.q * (1 + 1e-12))", "policies shuffle"),
    fault("records are allocated by a permutation", ALLOCATION, "stream.words(size * k)",
          "stream.permutation(size * k)",
          "allocation_sampler"),
    fault("a record is in a round twice, for another", ALLOCATION, ".any(1)] = last", ".any(1)] = drawn[0]",
          "allocation_sampler"),
    fault("a resumed job goes on within its allocated epoch", PLAN, "return max(completed, min(charged",
          "return max(completed, 0 * min(charged", "allocated_rounds"),
    fault("the step of a small last sample is as long as others", "privacy/fit.py", "trained.grad.mul_(weight)",
          "trained.grad.mul_(1.0)", "shuffle"),
    fault("a resumed epoch begins with its first samples", "privacy/sampling/loader.py", "drawn[t % len(drawn) :]",
          "drawn", "policies shuffle"),
    fault("a step may say that a record counts more than once", "privacy/private_metrics.py",
          " or name == SAMPLE_SIZE:", ":", "private_metrics -k size"),
    fault("records are in several parts", CYCLIC, "partition_of.eq(part)", "partition_of.le(part)", "correlated"),
    fault("an empty sample is skipped", "privacy/sampling/loader.py",
          "range(0, max(1, len(rows)), self.max_physical_batch_size)",
          "range(0, len(rows), self.max_physical_batch_size)", "policies -k empty"),
    Fault("the denominator is the size of the sample", ENGINE,
          (("        chunk = Chunk.of(",
            "        self.drawn = getattr(self, 'drawn', 0) + size\n        chunk = Chunk.of("),
           ("self._correlated, plan.sampling.q * plan.n", "self._correlated, max(1, self.drawn)")),
          "callback -k denominator"),
    fault("no noise for an empty sample", MECHANISM, "    noise.add_to(noisy,",
          "    if any(bool(total.any()) for total in sums.values()):\n        noise.add_to(noisy,",
          "callback -k empty_sample"),
    fault("the denominator is that of the first round", ENGINE, "self._correlated, plan.sampling.q * plan.n",
          "self._correlated, self.plan.sampling.q * self.current_plan.n", "callback -k schedule"),
    # The plan and adaptive bounds
    fault("noise is divided by its share", PLAN, "z * S / math.sqrt(self.share)", "z * S * math.sqrt(self.share)",
          "plan -k allocation"),
    fault("gradients take all of the budget", "privacy/plan/make.py",
          "share, rule = left * shares[name], clip_rules[name]",
          "share, rule = shares[name], clip_rules[name]",
          "private_metrics -k shares_leave"),
    fault("a schedule moves S and not the noise", PLAN, "sigma=group.sigma * scale * by.z", "sigma=group.sigma * by.z",
          "callback -k schedule"),
    fault("adaptive bounds move the other way", "privacy/plan/adaptive_clipping.py", "-member.learning_rate",
          "member.learning_rate",
          "adaptive_clipping"),
    fault("every group has the first group's clip rule", "privacy/plan/make.py",
          "left * shares[name], clip_rules[name]",
          "left * shares[name], [*clip_rules.values()][0]", "by_group"),
    fault("a group that does not adapt is counted", "privacy/gradients/clipped_sums.py",
          "            if group.name not in self._with_adapting_S | self._with_adapting_alphas:",
          "            if group.is_metric:", "adaptive_clipping by_group"),
    fault("a group's clipping norm is another's", "privacy/plan/clipping.py",
          "S |= dict(zip(names, norms, strict=True))", "S |= dict(zip(reversed(names), norms, strict=True))",
          "by_group plan"),
    fault("counts are of 0 and 1", "privacy/gradients/clipped_sums.py", ".to(self._dtype) - 0.5)", ".to(self._dtype))",
          "adaptive_clipping"),
    fault("noise does not follow an adaptive bound", "privacy/plan/adaptive_clipping.py",
          "S=group.S * factor, sigma=group.sigma * factor", "S=group.S * factor", "adaptive_clipping"),
    fault("two targets are taken", OPTIONS, "if len(self.given) > 1:", "if False:", "options -k own_values"),
    fault("a sample larger than the data", POLICY, "if self.expected_batch_size > n:", "if False:",
          "plan -k out_of_range"),
    fault("a schedule of q for samples of fixed size", OPTIONS,
          "if self.q is not None and not sampling.rate_can_vary:", "if False:",
          "plan -k out_of_range"),
    fault("any adjacency is claimed", "privacy/plan/make.py",
          "check_covered(type(policy), adjacency, target.accountant)", 'adjacency or "add_remove"',
          "plan -k out_of_range"),
    # The ledger
    Fault("a round is in the ledger after its release", ENGINE,
          (("            ledger.query(group.query)\n        ledger.commit()\n",
            "            ledger.query(group.query)\n"),
           ("        self._processes.broadcast(released)\n        return released\n",
            "        self._processes.broadcast(released)\n        ledger.commit()\n        return released\n")),
          "callback -k before_its_noise"),
    Fault("a preparation is in the ledger after its noise", PREPARING,
          (("            ledger.commit()\n            if processes", "            if processes"),
           ("            processes.broadcast({name: total})\n",
            "            processes.broadcast({name: total})\n            ledger.commit()\n")),
          "preprocessing -k ledger"),
    fault("a ledger with half of S", PLAN, "SumQueryEvent(self.name, self.S, ", "SumQueryEvent(self.name, self.S / 2, ",
          "callback -k schedule"),
    fault("a resumed ledger forgets its rounds", WRITING, "Counter(before.ledger.rounds)", "Counter()", "ledger"),
    fault("every tenth round is not in the ledger", WRITING,
          "            self._append(described + chain.round(spec), chain)\n        self._closed",
          "            if sum(self._counts.values()) % 10 != 9:\n"
          "                self._append(described + chain.round(spec), chain)\n        self._closed",
          "audit -k correlated_noise_refutes"),
    fault("any ledger is continued", WRITING, '.hexdigest() != position["sha256"]', '.hexdigest() == ""',
          "ledger_file -k begins"),
    fault("a changed ledger is written on", WRITING, "elif found.st_size != self._chain.size:", "elif False:",
          "ledger_file -k lost"),
    fault("a resume loses a round", TRAINING, 'state_dict["completed"], state_dict.get("ledger")',
          'state_dict["completed"] + 1, state_dict.get("ledger")', "callback -k resuming"),
    fault("edited lines are read", "accounting/ledger/reader.py",
        "if own_link != link.decode() or line[-7:-3] != link:",
          "if False:", "ledger_lines"),
    # Accounting
    fault("an epoch's samples overlap", SHUFFLE, "return self.split(stream.permutation(size).tolist())",
          "return [self.split(stream.permutation(size).tolist())[t] for t in range(self.rounds_per_epoch)]",
          "audit -k contributes"),
    fault("a record is in one round more than allocated", ALLOCATION,
          "t, k = self.rounds_per_epoch, self.num_selected\n", "t, k = self.rounds_per_epoch, self.num_selected + 1\n",
          "audit -k contributes"),
    fault("sensitivity 1 where a record is replaced", "accounting/coverage.py", '"replace_one": 2}',
          '"replace_one": 1}', "accountants -k values"),
    fault("equation 1 with the largest group alone", EVENTS, "sum(query.squared_ratio(adjacency)",
          "max(query.squared_ratio(adjacency)", "ledger"),
    fault("‖c‖ is left out", EVENTS, "math.fsum(c**2 for c in self.bands or (1.0,))", "1", "banded_rounds"),
    fault("an epoch costs what its cheapest round does", SHUFFLE, "min(one.z for one in rounds)",
          "max(one.z for one in rounds)", "accountants -k shuffled"),
    fault("a pool writes to another record in compiled code", "privacy/gradients/lifted.py",
          "aten.max_pool3d_with_indices_backward.default: lambda", "None: lambda", "compiled -k masked"),
    fault("an index of unknown range is compiled", "privacy/gradients/graphs.py",
          "if self._lifted.unchecked_index is not None:", "if False:", "compiled -k reach_another"),
    fault("a policy of one's own costs what it says itself", "accounting/sampling/__init__.py",
          "return sampling_event(**SamplingEvent(policy, n, first if policy.drawn_with else None).facts())",
          "return SamplingEvent(policy, n, first if policy.drawn_with else None)", "options -k derived"),
    fault("an allocated epoch costs what its cheapest round does", ALLOCATION, "z, longer = min(", "z, longer = max(",
          "random_allocation_releases"),
    fault("a record in several rounds of an epoch counts as in one", ALLOCATION, "(t // k, k - longer)", "(t // k, 1)",
          "random_allocation_releases"),
    fault("who is sure to be in an epoch may be in none", ALLOCATION, "Release(z, policy=cls.name",
          "Release(z, 1 / steps, policy=cls.name", "risk"),
    fault("equal rounds count once", RELEASES, "            counts[release] += count",
          "            counts[release] = 1", "accountants -k values"),
    fault("rounds of several rates count as one", RELEASES, "rest = replace(release, z=0.0)",
          "rest = replace(release, z=0.0, q=1.0)", "accountants -k count_together"),
    fault("of nearly equal rounds some do not count", RELEASES, "found.get(last[rest], 0) + counts[release]",
          "counts[release]", "accountants -k count_together"),
    fault("a full truncated sample moves by S", "accounting/accountants.py",
          'release.z / 2 if release.policy == "truncated_poisson" else release.z', "release.z",
          "dominating_pairs -k truncated"),
    fault("a block's last rounds are free", CYCLIC, "left = math.ceil(", "left = math.floor(",
          "banded_rounds"),
    fault("a record is in a block's cheapest rounds", CYCLIC, "in sorted((one.z, one.times) for one in rounds):",
          "in sorted(((one.z, one.times) for one in rounds), reverse=True):", "banded_rounds"),
    fault("full batches add up otherwise", "accounting/composition.py", "np.dot(counts, 1 / z**2)",
          "np.dot(counts, 1 / z**3)", "accountants -k values"),
    fault("losses are rounded down", "accounting/dominating_pairs.py", "self.mass - up, 0.0)\n        edges[1:] += up",
          "self.mass, 0.0)", "dominating_pairs"),
    fault("a mean of ratios is rounded down", "accounting/random_allocation.py",
          "moved in ((index, each * (1 - up)), (index + 1, each * up))",
          "moved in ((index, each),)", "random_allocation -k 'two or agrees'"),
    fault("an odd number of rounds counts as one less", "accounting/random_allocation.py", 'if bit == "1":',
          "if False:", "random_allocation -k agrees"),
    fault("masses without room are forgotten", "accounting/random_allocation.py",
          "mass[::-1], zero, 2 * math.exp(-(far**2) / 2))", "mass[::-1], zero, 0.0)",
          "random_allocation -k ends_of_the_scale"),
    fault("privacy losses of adding a record alone", "accounting/pld.py",
          "[_Direction(pairs, counts, cumulants)]",
          "[_Direction([pair.reverse for pair in pairs], counts, cumulants.reverse)]", "pld -k far_tails"),
    fault("Rényi DP's conversion", "accounting/composition.py", "math.log(delta * alpha) / (alpha - 1)",
          "math.log(delta * alpha) / alpha", "accountants -k 'values or rdp'"),
    fault("the moments accountant's conversion", "accounting/accountants.py", "(moment - math.log(delta)) / k for",
          "(moment - math.log(delta)) / (k + 1) for", "accountants -k values"),
    fault("strong composition without its drift", "accounting/composition.py", "np.tanh(each / 2)",
          "0 * np.tanh(each / 2)", "accountants -k 'values or strong'"),
    fault("basic composition with all of δ each round", "accounting/composition.py", "delta / self.counts.sum()",
          "delta", "one_time_queries -k add_up"),
    fault("Laplace's moments", "accounting/composition.py", "alpha * np.expm1(np.minimum(up, 1))",
          "(alpha - 1) * np.expm1(np.minimum(up, 1))", "one_time_queries -k moments"),
    fault("a filter at the wrong order", "accounting/multiple_runs.py", "0))) / (order - 1)",
          "0))) / order", "privacy_filter -k rho"),
    fault("selection costs what the cheapest trial does", "accounting/multiple_runs.py", "return np.max([run_rdp",
          "return np.min([run_rdp", "sweep -k worst_case"),
    fault("a certificate may claim any ε", "commands/certificate.py", "claim >= found * (1 - _TOLERANCE)", "claim >= 0",
          "certificate -k 'differs or doctored'"),
    fault("any ε agrees with dp-accounting", "commands/certificate.py", "if low <= claimed <= LOOSEST * high", "if low",
          "certificate -k differs"),
    fault("dp-accounting replaces a record with null", "accounting/independent.py", "(2 * z, ", "(z, ",
          "certificate -k each_policy"),
    fault("calibration stops above the target", "accounting/calibration.py", "<= cost <= self._limit:",
          "<= cost <= self._limit * 1.01:", "calibration -k knob"),
    fault("calibration takes what it tried last", "accounting/calibration.py", " if tried[1] <= self._limit), None)",
          "), None)", "calibration -k unreachable"),
    fault("a target that is missed is not said", "accounting/calibration.py",
          "missed if cost < target.limit * (1 - precision) else", "missed if cost < 0 else", "calibration -k steps"),
    fault("moments of next to no noise", "accounting/composition.py", "np.log(q) + alpha / (2 * z**2)",
          "np.log(q) + alpha / (4 * z**2)", "accountants -k jump"),
    fault("the first split of δ found", "accounting/composition.py", "found if found <= others[t] else",
          "found if True else", "accountants -k best_split"),
    fault("noise on the average as if on the sum", "privacy/plan/allocation.py",
          "(records if self.sigma is None else 1.0)", "1.0", "solved_q -k average"),
    fault("rounds of epochs at the q given, not the solved one", "privacy/plan/make.py",
          "rounds = rounds or self.sampling.length(policy)", "rounds = rounds or self.plan.rounds",
          "solved_q -k epochs"),
    # What people meet
    fault("optimizers and schedules are not tried", "commands/build.py", "        made.step()",
          "        pass", "cli -k 'OneCycleLR or betas or StepLR'"),
    fault("an error of an optimizer is a traceback", "commands/build.py",
          "except Exception as error:  # torch raises", "except TypeError as error:  # torch raises", "cli -k StepLR"),
    fault("a bare key is not found in its section", "commands/command_line.py",
          "if keys and meant not in known else", "if keys and False else", "cli -k slow_is_imported"),
    fault("the end of a resumed job lacks what it repeats", "reporting/terminal.py", "(most := epsilon(at_end, delta",
          "(most := epsilon(plan.ledger(), delta", "lightning -k killed_training"),
    fault("a lock is waited for in silence", "tracking/client.py",
          'warnings.warn(\n            f"waiting for', 'str(\n            f"waiting for',
          "client -k waited_for"),
    # The budget of a data set
    fault("a lost artifact counts as nothing", BUDGET, 'return replace(known, note=str(error).removesuffix("."))',
          "return replace(known, ledger=Ledger('add_remove', {}))", "run_costs -k lost_artifact"),
    fault("a ledger without its closing line counts", BUDGET, "    if ledger.incomplete:", "    if False:",
          "run_costs -k lost_artifact"),
    fault("a ledger that may have lost its end counts", BUDGET, 'if "run" in found.header and read_end(path) is None:',
          "if False:", "run_costs -k lost_artifact"),
    fault("deleted runs do not count", BUDGET, "LIKE '%'\", ViewType.ALL)", "LIKE '%'\", ViewType.ACTIVE_ONLY)",
          "run_costs -k however_they_ended"),
    fault("a run counts as a ledger that the store lacks", BUDGET,
          "if _whole(output / LEDGER) == _artifact(uri, run_id, LEDGER):", "if _whole(output / LEDGER):",
          "run_costs -k only_once"),
    fault("a run is named before its plan is sent", BUDGET, "{**tags, DATA_ID: data_id}",
          "{DATA_ID: data_id, **tags}", "run_costs -k never_named"),
    fault("a resumed run counts as its ledger of before", BUDGET, "tags[COUNTS_AS] = PLANNED_LEDGER",
          "tags[COUNTS_AS] = LEDGER if earlier else PLANNED_LEDGER", "run_costs -k resumed"),
    fault("a run that is found twice counts as the least", BUDGET, "Counter(before.ledger.rounds) | Counter(",
          "Counter(before.ledger.rounds) & Counter(", "run_costs -k found_twice"),
    fault("a copy of a folder is the run's", "tracking/mirror.py", "if said.exists() and not said.samefile(output):",
          "if False:", "data_budget -k copy"),
    fault("a copy of before takes a run's rounds back", "tracking/mirror.py",
          'return START_TAG in run.data.tags and run.data.tags[START_TAG] not in facts["starts"]', "return False",
          "mirrored_jobs -k takes_nothing_back"),
    fault("a job that can go on counts in a store that will not know", "tracking/mirror.py",
          'if facts["spends"] and (folder / CHECKPOINT).exists()', "if False", "mirrored_jobs -k can_go_on"),
    fault("a job goes on in a store that another does not know of", "commands/saved_jobs.py",
          "former is not None and uri != former", "former is not None and uri is None",
          "data_budget -k its_own_store"),
    fault("metrics show how long rounds took", "tracking/mirror.py", 'self._facts["start"] + line',
          "int(time.time() * 1000)", "mirror -k how_long"),
    fault("a wrong ledger's plan is sent", "commands/train.py",
          'to_continue(job.output / LEDGER, state.get("ledger")).ledger', "read_ledger(job.output / LEDGER)",
          "data_budget -k its_own_store"),
    fault("a job without a name asks for other runs", "commands/train.py",
          "named = job.plan is not None and cfg.data.id is not None", "named = job.plan is not None",
          "data_budget -k names_no_data"),
    fault("a budget may be another than before", BUDGET, "if other.budget is not None and other.budget != budget:",
          "if False:", "data_budget -k adjacency"),
    fault("a budget forgets the runs before", BUDGET, "budget.holds(spent + cost)", "budget.holds(cost)",
          "data_budget -k second"),
    fault("a replaced record stays in its part", "accounting/multiple_runs.py",
          'ledger.part if ledger.adjacency == "add_remove" else None', "ledger.part", "parts -k replaced"),
    fault("a job on a part uses all rows", "training/data/tables.py", 'in_part(f"{key}={path}", rows, self._part)',
          "rows", "data_parts -k divide"),
    fault("a row without a target is left out", "training/data/tables.py",
          "return PlacedRows(x, labels, usable=known, reason=_UNUSABLE)",
          "return TensorDataset(x[known], labels[known])", "tables -k without_a_target"),
    fault("a row without a target is used", "privacy/sampling/batches.py", "if self._usable[i]]", "]",
          "rows_in_place -k csv-example"),
    fault("a blank line of JSON is no row", "training/data/raw.py", "if named is not None or line.strip()]",
          "if line.strip()]", "rows_in_place -k jsonl-example"),
    fault("a prompt has a loss", "training/data/documents.py", " | (place < self.prompts[i])", "",
          "language -k filled_with_fields"),
    fault("a conversation's first turns have a loss", "training/data/prompts.py", "self._tried(turns[:-1], True)",
          "self._tried(turns[:1], True)", "language -k last_turn"),
    fault("a missing value changes another file's numbers", "training/data/raw.py",
          "[one.astype(object) for one in parts]", "parts", "language -k missing_value"),
    fault("samples of a seeded run are called private", "commands/sample.py", 'about.get("private") != "True"',
          '"epsilon" not in about', "language -k known_noise_seed"),
    fault("training records are prompts from another folder", "commands/sample.py", "str(start / Path(private)",
          "str(Path(private)", "language -k training_records_are"),
    fault("a card counts the rounds done", "integrations/transformers.py", "private.ledger.training_rounds",
          "private.rounds_done", "private -k newest"),
    fault("a field too many is cut off", "training/data/raw.py", "kept = last if is_public or not missing else []",
          "kept = last[: len(names)]", "rows_in_place -k csv-example"),
    fault("an image's class moves others", "training/data/images.py", "        files.sort()", "        ",
          "rows_in_place -k images-example"),
    fault("rows without a user are one user's", "privacy/sampling/privacy_unit.py",
          "        examples.pop(NOBODY, None)\n",
          "", "rows_in_place -k csv-user"),
    fault("a user's place is that of its first row", "privacy/sampling/privacy_unit.py",
          "for user in sorted(examples)]",
          "for user in examples]", "rows_in_place -k csv-user"),
    fault("an example that cannot be read takes its unit along", "privacy/sampling/privacy_unit.py",
          "except Exception as error:", "except ZeroDivisionError as error:", "privacy_unit -k left_out"),
    fault("rows without an id may be test rows", "training/data/tables.py", ' & ids.ne("").to_numpy()', "",
          "tables -k without_an_id"),
    fault("which rows can be used is not compared", "privacy/distributed.py", "if type(dataset) is PlacedRows:",
          "if False:", "distributed -k told_apart"),
    fault("without privacy rows fail", "commands/job.py", "data.usable_only = plan is None",
          "data.usable_only = False", "tables -k trains_without"),
    fault("a budget lets two jobs in at once", BUDGET, "locked(lock_of(uri, data_id),",
          'locked(output / "lock",', "data_budget -k race"),
    fault("what is not named is trained too", "training/pretrained.py", "requires_grad_(is_trained(name))",
          "requires_grad_(True)", "pretrained"),
    fault("weights of any layer may differ", "training/pretrained.py", 'if name.rpartition(".")[0] not in layers]',
          "if False]", "pretrained"),
    fault("other records find these features", "training/data/features.py", "_hash(x, of_some)", "_hash(of_some)",
          "features"),
    fault("another map finds these features", "training/data/features.py", "_hash(x, of_some)", "_hash(x)", "features"),
    fault("files of features are everybody's", "training/data/features.py",
          'os.chmod(f"{unfinished}/features", 0o600)', 'os.chmod(f"{unfinished}/features", 0o644)', "features"),
    fault("features may be random", "training/data/features.py",
          "if _bytes(again) != _bytes(of_some):", "if False:", "features"),
    fault("a map may remember the first record", "training/data/features.py", "unused = copy.deepcopy(by)",
          "unused = by", "features"),
    fault("features may be of records together", "training/data/features.py",
          ".flip(0), unused)[1::2]", ".flip(0), unused, 1)[1::2]", "features"),
    fault("a map may keep the largest record", "training/data/features.py", "1000 * some if", "some if",
          "features"),
    fault("features forget their users and which rows can be used", "training/data/features.py",
          "train = copy.copy(train)", "train = TensorDataset(*train.tensors)", "features"),
    fault("features ignore a sampler", "training/data/features.py",
          "if not (is_whole and sampler.data_source is dataset and len(sampler) == len(dataset)):",
          "if False:", "features"),
    fault("features may be of a training on the records", "commands/build.py",
          '_refuse_non_private_weights(cfg, "data.features_of.weights", Path(path).expanduser())', "pass",
          "pretrained"),
    fault("a backbone is in training mode", "training/data/features.py", "model.eval(), size", "model.train(), size",
          "features"),
    fault("a map gets more than it allows", "training/data/features.py",
          'at_once or int(getattr(by, "at_once", 1))', "at_once or 64", "features"),
    fault("a mirror image is none", "training/data/features.py", "torch.cat([x, x.flip(-1)])", "torch.cat([x, x])",
          "features"),
    fault("images are sheared by one another", "training/data/features.py",
          "torch.cat([_upright(one[None]) for one in x])", "_upright(x)", "features"),
]  # fmt: skip


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("only", nargs="*")
    asked.add_argument("--all", action="store_true", help="run the whole suite on each")
    given = asked.parse_args()
    missed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        os.chdir(folder)
        sys.path[:0] = [folder]
        for name in SLOW_TO_IMPORT:
            importlib.import_module(name)
        for number, fault in enumerate(FAULTS, 1):
            if given.only and not any(one == str(number) or one in fault.name for one in given.only):
                continue
            began = time.monotonic()
            by = caught_by(fault, number, Path(folder), given.all)
            tried, missed = tried + 1, missed + (not by)
            print(f"{number:3} {fault.name:58} {time.monotonic() - began:4.0f} s  {by or 'NOT CAUGHT'}", flush=True)
    print(f"{tried - missed} of {tried} faults were caught.")
    return missed


def copied(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copy(source, folder / name)


def caught_by(fault: Fault, number: int, copy: Path, whole: bool) -> str:
    """The test that failed first; empty if none did.

    Raises:
        RuntimeError: the tests could not be run.
    """
    path = copy / "dpexp" / fault.file
    right = text = path.read_text()
    for old, new in fault.changes:
        if text.count(old) != 1:
            raise RuntimeError(f"{fault.name}: {old!r} stands {text.count(old)} times in {fault.file}.")
        text = text.replace(old, new)
    path.write_text(text)
    os.utime(path, (number, number))  # a time of its own, so that no bytecode of another version is taken for it
    of, _, names = fault.tests.partition(" -k ")
    files = [str(next(copy.glob(f"tests/*/test_{name}.py"))) for name in of.split()] + (
        ["-k", names.strip("'")] if names else []
    )
    printed = copy / "printed.txt"
    status = forked([] if whole else ["-n", "0", *files], printed)
    path.write_text(right)
    os.utime(path, (0, 0))
    if status < 0:
        return f"the end of the process, by signal {-status}"
    said = printed.read_text(errors="replace")
    failed = re.search(r"^FAILED (?:tests/)?(.+?)(?: - .*)?$", said, re.MULTILINE)
    if status == 0:
        return ""
    if failed is None:
        raise RuntimeError(f"{fault.name}: {said[-3000:]}")
    return failed[1]


def forked(arguments: list[str], printed: Path) -> int:
    """Runs pytest in a process that has imported what is slow; returns its exit status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            with printed.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ["PYTHONPATH"] = os.getcwd()
            status = int(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", *arguments]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
