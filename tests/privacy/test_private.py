"""Loops of one's own: the same weights as by a Trainer, the same ledger, the same refusals."""

import copy
import itertools
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers
from plans import trainer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset, default_collate
from transformers import TrainerCallback

import dpexp
from dpexp.accounting.ledger import LedgerWriter
from dpexp.integrations.transformers import PrivateTrainer
from dpexp.privacy.gradients.step import LOOP

N, DELTA = 300, 1e-4
POISSON = dpexp.Poisson(sampling_rate=0.1, steps=6)
TWO = dpexp.Poisson(sampling_rate=0.1, steps=2)


def records():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 6, generator=generator)
    return TensorDataset(x, x.unflatten(1, (3, 2)).sum(2).argmax(1))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def plan_of(module, z=1.0, n=N, sampling=POISSON):
    return dpexp.make_plan(module, n=n, sampling=sampling, target=dpexp.Target(noise_multiplier=z, delta=DELTA))


def loss_of(model, record):
    x, y = record
    return F.cross_entropy(model(x), y)


def vector(model):
    """All weights."""
    return parameters_to_vector(model.parameters()).detach()


class Loop:
    """A model and its private training."""

    def __init__(self, path, seed=3, model=None, plan=None, **options):
        self.model = model or network()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        plan = plan or plan_of(self.model)
        self.private = dpexp.Private(self.model, optimizer, plan, path, noise_seed=seed, **options)

    def run(self, rounds=None, step=loss_of, dataset=None, **loading):
        samples = self.private.rounds(records() if dataset is None else dataset, **loading)
        for sample in itertools.islice(samples, rounds):
            self.private.step(step, sample)
        samples.close()
        return self


@pytest.mark.parametrize("z, is_told", [(29.0, False), (31.0, True)])
def test_noise_in_which_nothing_can_be_learnt_is_said_before_the_first_round(tmp_path, recwarn, z, is_told):
    """At z = q n = 30, the noise is as large as all clipped gradients."""
    model = network()
    next(iter(Loop(tmp_path / "ledger.jsonl", model=model, plan=plan_of(model, z)).private.rounds(records())))
    found = [str(one.message) for one in recwarn if "so much noise" in str(one.message)]
    assert [one.partition(" that ")[0] for one in found] == ["z = 31 is so much noise"] * is_told


def test_a_loop_and_a_trainer_give_the_same_weights_and_ledger(tmp_path):
    module = dpexp.Classifier(network(), lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    callback = dpexp.PrivacyCallback(plan_of(module), tmp_path / "trainer.jsonl", noise_seed=3)
    trainer(callback).fit(module, DataLoader(records(), 64))
    loop = Loop(tmp_path / "loop.jsonl").run()
    assert torch.equal(vector(loop.model), vector(module)) and not torch.equal(vector(module), vector(network()))
    ledgers = [dpexp.read_ledger(tmp_path / f"{name}.jsonl") for name in ("loop", "trainer")]
    assert ledgers[0].rounds == ledgers[1].rounds
    assert loop.private.epsilon() == dpexp.epsilon(ledgers[0], delta=DELTA)


def test_what_a_killed_loop_released_after_its_checkpoint_is_counted(tmp_path):
    loop = Loop(tmp_path / "ledger.jsonl").run(2)
    weights, state = copy.deepcopy((loop.model.state_dict(), loop.private.state_dict()))
    loop.run(3)
    again = Loop(tmp_path / "ledger.jsonl")
    again.model.load_state_dict(weights)
    again.private.load_state_dict(state)
    epsilon = again.private.epsilon()
    again.run()
    assert again.private.rounds_done == 6 and again.private.epsilon() > epsilon > 0
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 5 + 4


def twice(loop):
    for sample in loop.private.rounds(records()):
        loop.private.step(loss_of, sample)
        loop.private.step(loss_of, sample)


def late(loop):
    for sample in loop.private.rounds(records()):
        loop.private.step(loss_of, sample)
    loop.private.step(loss_of, sample)


def of_another(loop):
    other = Loop(loop.private.ledger_path.with_name("other.jsonl"))
    for sample, _ in zip(other.private.rounds(records()), loop.private.rounds(records()), strict=True):
        loop.private.step(loss_of, sample)


def never(loop):
    list(loop.private.rounds(records()))


def unpacked(loop):
    for sample in loop.private.rounds(records()):
        _, _ = sample


def batch_norm(loop):
    loop.model.append(nn.BatchNorm1d(3))
    loop.run()


def stateful(loop):
    def step(model, record):
        model[0].bias.data.add_(record[0].sum() * 1e-3)
        return loss_of(model, record)

    loop.run(step=step)


def another_head(loop):
    head = nn.Linear(3, 3)
    loop.run(step=lambda model, record: F.cross_entropy(head(model(record[0])), record[1]))


def another_plan(loop):
    for sample in loop.private.rounds(records()):
        loop.private.step(loss_of, sample)
        loop.private.plan = plan_of(loop.model)


def goes_back(loop):
    for _ in loop.private.rounds(records()):
        loop.private.load_state_dict(loop.private.state_dict())


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (goes_back, "load_state_dict was called while rounds are running"),
        (twice, "takes the present sample"),
        (late, "takes the present sample"),
        (of_another, "takes the present sample"),
        (never, "round 1 ended without private.step"),
        (unpacked, r"sealed outside training_step \(in a loop: loss_of"),
        (batch_norm, "mixes the records of a batch"),
        (stateful, "changed inside training_step"),
        (another_head, "it is not the model's"),
        (another_plan, "the plan was replaced"),
    ],
)
def test_mistakes_are_refused(tmp_path, mistake, words):
    with pytest.raises(dpexp.ConfigError, match=words):
        mistake(Loop(tmp_path / "ledger.jsonl", seed=None))


def test_an_interrupt_while_a_loop_ends_leaves_it_ended_without_its_keys(tmp_path):
    private = (loop := Loop(tmp_path / "ledger.jsonl")).private
    rounds = private.rounds(records())
    private.step(loss_of, next(rounds))
    engine = private._fit.engine
    with patch.object(LedgerWriter, "sync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        rounds.close()
    assert not hasattr(engine, "_correlated")  # which holds the key of the noise
    assert loop.run().private.rounds_done == 6


X, Y = records().tensors


class Frame:
    """As pandas' DataFrame: rows of an array, found by column."""

    shape, ndim, keys = (N, 6), 2, ("a",)
    __len__ = lambda self: N  # noqa: E731
    __getitem__ = lambda self, column: {"a": X}[column]  # noqa: E731
    __array__ = lambda self, *_, **__: X.double().numpy()  # noqa: E731


@pytest.fixture(scope="module")
def of_tensors(tmp_path_factory):
    return vector(Loop(tmp_path_factory.mktemp("tensors") / "ledger.jsonl").run(2).model)


@pytest.mark.parametrize(
    "data",
    [(X, Y), (X.numpy(), Y.numpy()), (X.double().numpy(), Y.numpy()), (X.double(), Y), (Frame(), Y)],
    ids=["tensors", "arrays", "arrays of float64", "tensors of float64", "a frame"],
)
def test_arrays_and_tensors_are_taken_as_a_data_set(tmp_path, data, of_tensors):
    loop = Loop(tmp_path / "ledger.jsonl").run(2, dataset=data)
    assert torch.equal(vector(loop.model), of_tensors)


@pytest.mark.parametrize("of_arrays", [False, True])
def test_a_step_that_reads_the_arrays_it_trains_on_is_refused(tmp_path, of_arrays):
    """Also where the records are copies of them, in another type."""
    x = X.double()

    def centred(model, record):
        return F.cross_entropy(model(record[0] - x.mean(0).float()), record[1])

    with pytest.raises(dpexp.ConfigError, match="reads the training data itself"):
        Loop(tmp_path / "ledger.jsonl").run(step=centred, dataset=(x.numpy(), Y.numpy()) if of_arrays else (x, Y))


NO_DATA_SET = r"loader\.dataset\).* \(X, y\); it got a %s\."


@pytest.mark.parametrize(
    "given, said",
    [
        (((X, Y[1:]),), rf"it got parts of \[{N}, {N - 1}\] rows\."),
        ((X, Y), r"takes one data set, as the tuple \(X, y\)"),
        ((DataLoader(records(), 32),), NO_DATA_SET % "DataLoader"),
        ((iter(DataLoader(records(), 32)),), NO_DATA_SET % "_SingleProcessDataLoaderIter"),
        ((map(tuple, X),), NO_DATA_SET % "map"),
        (({"x": X, "y": Y},), NO_DATA_SET % "dict"),
        ((Frame(),), NO_DATA_SET % "Frame"),
        ((None,), NO_DATA_SET % "NoneType"),
    ],
)
def test_what_is_no_data_set_is_refused_before_a_round(tmp_path, given, said):
    loop = Loop(tmp_path / "ledger.jsonl")
    with pytest.raises(dpexp.ConfigError, match=said):
        loop.private.rounds(*given)
    assert not loop.private.ledger_path.exists()


def test_loops_go_on_where_the_plan_stands_until_its_rounds_are_done(tmp_path):
    loop = Loop(tmp_path / "ledger.jsonl", seed=None)
    private, left = loop.private, []
    for rounds in (2, None, None):
        left.append(len(private.rounds(records())))
        loop.run(rounds)
    assert left == [6, 4, 0] and private.rounds_done == 6
    assert repr(private) == f"Private: 6 of 6 rounds done, ledger {tmp_path / 'ledger.jsonl'}"
    ledger = dpexp.read_ledger(tmp_path / "ledger.jsonl")
    assert ledger == private.plan.ledger() and private.epsilon() == dpexp.epsilon(ledger, delta=DELTA)
    with pytest.warns(UserWarning, match="the plan's 6 rounds are done, so that nothing more is trained") as told:
        loop.run()
    shown = [warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in told]
    assert shown == [f"dpexp: {one.message}\n" for one in told], "without a path, as in a notebook"


def test_a_round_that_is_done_again_after_an_interrupt_counts_twice(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "ledger.jsonl", seed=None)
    with monkeypatch.context() as patched:
        patched.setattr(loop.private, "_optimize", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    assert loop.private.rounds_done == 0
    loop.run()
    assert loop.private.rounds_done == 6
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 7


def test_a_loop_that_has_not_ended_is_ended_before_another_begins(tmp_path):
    private = Loop(tmp_path / "ledger.jsonl").private
    first = private.rounds(records())
    private.step(loss_of, next(first))
    with pytest.raises(dpexp.ConfigError, match=r"an earlier loop .* call its close\(\)"):
        next(private.rounds(records()))
    private.step(loss_of, next(first))
    first.close()
    second = private.rounds(records())
    private.step(loss_of, next(second))
    assert private.rounds_done == 3


def test_records_of_different_lengths_are_padded_and_processed_together(tmp_path):
    rows = [(torch.full((i % 7 + 1,), i % 9 + 1), torch.tensor(i % 3)) for i in range(N)]
    collated, seen = set(), set()

    def collate(items):
        words = nn.utils.rnn.pad_sequence([words for words, _ in items], batch_first=True)
        collated.add(words.shape[1])
        return words, torch.stack([y for _, y in items])

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, words):
            seen.add(words.shape[-1])
            return self.head(self.words(words).sum(1))

    loop = Loop(tmp_path / "ledger.jsonl", model=Bag(), pad_to=(4, 8))
    with pytest.warns(UserWarning, match="padded by collate to the next of the lengths 4, 8"):
        loop.run(dataset=rows, collate_fn=collate)
    assert seen <= {4, 8} <= collated
    assert loop.private.rounds_done == 6


@pytest.mark.parametrize(
    ("lengths", "said"), [(5, r"16 records have \d shapes\..*pad_to"), (99, "one at a time.*pad_to")]
)
def test_many_shapes_are_announced_before_the_first_round(tmp_path, lengths, said):
    rows = [(torch.ones(1 + i % lengths, 6), torch.tensor(i % 2)) for i in range(N)]
    model = network()
    few = plan_of(model, sampling=dpexp.Poisson(sampling_rate=0.01, steps=6))  # each of whose shapes is traced
    loop = Loop(tmp_path / "ledger.jsonl", model=model, plan=few, max_physical_batch_size=4)
    with pytest.warns(UserWarning, match=said):
        loop.run(1, lambda model, record: F.cross_entropy(model(record[0]).mean(1), record[1]), rows,
                 collate_fn=lambda items: default_collate(items))  # fmt: skip


def test_of_networks_that_take_turns_the_critic_is_private_while_the_generator_learns(tmp_path):
    """Each release is the sum of clipped gradients of the critic's loss with the present generator."""
    torch.manual_seed(1)
    generator, critic = (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, d)) for d in (2, 1))
    optimizers = torch.optim.SGD(critic.parameters(), 0.1), torch.optim.SGD(generator.parameters(), 0.1)
    x, z, released = torch.randn(10, 2), torch.randn(5, 2), []
    x[-1] *= 1e3

    def critics_loss(critic, record):
        return F.softplus(-critic(record[0])).mean() + F.softplus(critic(generator(z).detach())).mean()

    def clipped_gradient(record):
        found = torch.autograd.grad(critics_loss(critic, (record[None],)), [*critic.parameters()])
        flat = parameters_to_vector(found)
        return flat / flat.norm().clamp(min=1)

    plan = plan_of(critic, 1e-7, 10, dpexp.FullBatch(steps=3))
    private = dpexp.Private(critic, optimizers[0], plan, tmp_path / "ledger.jsonl", noise_seed=3)
    for sample in private.rounds(TensorDataset(x)):
        before, expected = vector(critic), sum(map(clipped_gradient, x))
        private.step(critics_loss, sample)
        released.append((before - vector(critic)) * 10 / 0.1)
        assert torch.allclose(released[-1], expected, atol=1e-4)
        F.softplus(-critic(generator(z))).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert not torch.allclose(released[0], released[-1], atol=1e-3)


# A Trainer of transformers


class Words(nn.Module):
    """Predicts the first of the words, and gives its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids, labels):
        return {"loss": F.cross_entropy(self.head(self.words(input_ids).mean(1)), labels[:, 0])}


class InHalf(Words):
    def forward(self, input_ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input_ids, labels)


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def its_trainer(folder, model=None, callbacks=(), options=None, sampling=POISSON, kind=PrivateTrainer, **arguments):
    """A PrivateTrainer on texts of its own, by default for six rounds in epochs of ten."""
    model = model or Words()
    ids = torch.randint(20, (N, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 0.01}
    return kind(
        model, transformers.TrainingArguments(str(folder), **quiet | arguments), train_dataset=rows,
        eval_dataset=rows[:20], plan=plan_of(model, sampling=sampling), callbacks=[*callbacks],
        options=options,
    )  # fmt: skip


def trained(private_trainer):
    """Its weights."""
    private_trainer.train()
    return vector(private_trainer.model)


def test_a_trainers_batch_is_how_many_records_are_processed_at_once_and_a_known_seed_is_said_in_its_card(tmp_path):
    its = its_trainer(
        tmp_path, options={"noise_seed": 1}, gradient_accumulation_steps=2, per_device_train_batch_size=3,
        save_strategy="steps", save_steps=6,
    )  # fmt: skip
    its.train()
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 6
    assert its.private.options.max_physical_batch_size == 3
    card = (tmp_path / "checkpoint-6" / "README.md").read_text()
    assert "**Not private**: the noise seed is known." in card and "ε" not in card


@pytest.mark.parametrize("count", ["global_step", "epoch"])
def test_a_loss_that_depends_on_a_trainers_count_of_rounds_runs_one_record_at_a_time(tmp_path, count):
    class Growing(PrivateTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs)["loss"] * (1 + getattr(self.state, count))

    class Modes(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(its.private._fit.engine.step.mode)

    seen = []
    its = its_trainer(tmp_path, callbacks=[Modes()], kind=Growing)
    its.train()
    assert seen == [LOOP] * 6


class StopAfterThree(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3


def test_a_trainer_that_goes_on_steps_the_optimizer_that_it_has_now(tmp_path):
    its = its_trainer(tmp_path, callbacks=[StopAfterThree()])
    after_three = trained(its)
    its.optimizer, its.lr_scheduler = torch.optim.SGD(its.model.parameters(), lr=0.0), None
    assert torch.equal(trained(its), after_three) and its.private.rounds_done == 6


class Worse(TrainerCallback):
    """After round 2, each evaluation is worse than the one before."""

    def on_evaluate(self, args, state, control, metrics, **_):
        metrics["eval_loss"] = [5, 1, 2, 3, 4, 4][state.global_step - 1]


class Interrupt(TrainerCallback):
    def on_save(self, args, state, control, **_):
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_trainer_keeps_the_newest_and_the_best_checkpoint_and_loads_the_best(tmp_path):
    """Also where it goes on after it was killed."""

    def its(*callbacks):
        return its_trainer(
            tmp_path, None, [Worse(), *callbacks], eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, load_best_model_at_end=True, save_total_limit=1, logging_steps=2,
        )  # fmt: skip

    def checkpoints():
        return sorted(path.name for path in tmp_path.glob("checkpoint-*"))

    with pytest.raises(KeyboardInterrupt):
        its(Interrupt()).train()
    assert checkpoints() == ["checkpoint-2", "checkpoint-4"]
    resumed, again = its(), its()
    assert resumed.train(resume_from_checkpoint=True).global_step == resumed.private.rounds_done == 6
    assert checkpoints() == ["checkpoint-2", "checkpoint-6"]
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 6
    assert [log["epsilon"] for log in resumed.state.log_history if "epsilon" in log][-1] == resumed.private.epsilon()
    saved, last = (
        torch.load(tmp_path / f"checkpoint-{step}" / "private.pt", weights_only=True)["weights"] for step in (2, 6)
    )
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, saved[name]) and not torch.equal(p, last[name])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 10
    assert "10 rounds with sampling" in (tmp_path / "checkpoint-6" / "README.md").read_text()


class Note(TrainerCallback):
    """Which events are called, and the gradients' norm before each step."""

    def __init__(self):
        self.called, self.released = [], []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            self.called.append(name)
        return super().__getattribute__(name)

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **_):
        self.released.append(float(optimizer.param_groups[0]["params"][0].grad.norm()))


def test_a_trainer_of_transformers_calls_all_events_in_their_order(tmp_path):
    note = Note()
    its_trainer(tmp_path, None, [note], logging_strategy="no").train()
    a_round = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    called = [name for name in note.called if name != "on_init_end"]
    assert called == ["on_train_begin", "on_epoch_begin", *6 * a_round, "on_epoch_end", "on_log", "on_train_end"]
    assert min(note.released) > 0


def test_a_trainer_of_transformers_lowers_its_rate_where_the_evaluation_stalls(tmp_path):
    its = its_trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, logging_steps=1, learning_rate=1e-5,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 1, "factor": 0.5},
    )  # fmt: skip
    its.train()
    rates = [log["learning_rate"] for log in its.state.log_history if "learning_rate" in log]
    assert rates == [1e-5, 1e-5, 1e-5, 5e-6, 5e-6, 2.5e-6]
    with pytest.warns(UserWarning, match="the plan's 6 rounds are done"):
        its.train()
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 6


@pytest.mark.parametrize(
    "owner, name, said",
    [
        ("args", "packing", "packing=True joins several rows"),
        ("args", "padding_free", "padding_free=True joins several rows"),
        ("data_collator", "padding_free", "padding_free=True joins several rows"),
        ("args", "fp16", "fp16=True scales gradients by the data"),
    ],
)
def test_a_trainer_of_transformers_refuses_what_joins_rows_or_scales_by_the_data(tmp_path, owner, name, said):
    its = its_trainer(tmp_path)
    its.data_collator = partial(its.data_collator)  # of its own, which may have attributes
    setattr(getattr(its, owner), name, True)
    with pytest.raises(dpexp.ConfigError, match=said):
        its.train()


def test_adapters_whose_ranks_are_chosen_as_they_train(tmp_path):
    """AdaLoRA, whose callback reads p.grad: the noisy average."""
    peft = pytest.importorskip("peft")

    class Allocate(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            model.base_model.update_and_allocate(state.global_step)

    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=3, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2(), config)
    its = its_trainer(tmp_path, model, [Allocate()], sampling=dpexp.Poisson(sampling_rate=0.1, steps=3))
    its.train()
    assert its.private.rounds_done == 3 and model.peft_config["default"].rank_pattern


def test_a_trainer_of_transformers_computes_losses_in_bf16(tmp_path):
    """As a model does whose forward is under autocast; evaluations before and between the rounds change nothing."""
    usual = {"options": {"noise_seed": 1}, "eval_strategy": "steps", "eval_steps": 1, "sampling": TWO}
    its, in_half, other = (
        its_trainer(tmp_path / name, kind(), **usual, bf16=name == "bf16")
        for name, kind in (("bf16", Words), ("in half", InHalf), ("other", Words))
    )
    never_evaluated = its_trainer(tmp_path / "never", options={"noise_seed": 1}, sampling=TWO, bf16=True)
    its.evaluate()
    found = trained(its)
    assert torch.equal(found, trained(in_half)) and not torch.equal(found, trained(other))
    assert torch.equal(found, trained(never_evaluated))


def test_gradient_checkpointing_of_a_trainer_is_two_runs_of_low_memory(tmp_path):
    models = gpt2(), gpt2()
    models[1].gradient_checkpointing_enable()  # as scripts do by themselves
    models[1].enable_input_require_grads()
    usual, low = (
        its_trainer(
            tmp_path / str(k), model, options={"noise_seed": 1, "compile": False}, sampling=TWO,
            gradient_checkpointing=bool(k),
        )
        for k, model in enumerate(models)
    )  # fmt: skip
    assert torch.equal(trained(usual), trained(low))
    assert (usual.private.options.memory, low.private.options.memory) == ("usual", "low")
