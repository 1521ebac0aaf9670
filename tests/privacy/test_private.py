"""Loops of one's own: the same weights as by a Trainer, the same ledger, the same refusals."""

import itertools
import warnings

import pytest
import pytorch_lightning as pl
import torch
from plans import trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpexp

N, DELTA = 300, 1e-4


def records():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 6, generator=generator)
    return TensorDataset(x, x.unflatten(1, (3, 2)).sum(2).argmax(1))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def plan_of(module, z=1.0):
    sampling, target = dpexp.Poisson(sampling_rate=0.1, steps=6), dpexp.Target(noise_multiplier=z, delta=DELTA)
    return dpexp.make_plan(module, n=N, sampling=sampling, target=target)


def loss_of(model, record):
    x, y = record
    return F.cross_entropy(model(x), y)


class Loop:
    """A model, its optimizer and its private training."""

    def __init__(self, path, seed=3, model=None, **options):
        self.model = model or network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.private = dpexp.Private(self.model, self.optimizer, plan_of(self.model), path, noise_seed=seed, **options)

    def run(self, rounds=None, step=loss_of, dataset=None):
        samples = self.private.rounds(dataset or records())
        for sample in itertools.islice(samples, rounds):
            self.private.step(step, sample)
        samples.close()

    def states(self):
        copies = {name: value.clone() for name, value in self.model.state_dict().items()}
        return copies, self.optimizer.state_dict(), self.private.state_dict()


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()

    def training_step(self, batch):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


@pytest.mark.parametrize("z, is_told", [(29.0, False), (31.0, True)])
def test_noise_in_which_nothing_can_be_learnt_is_said_before_the_first_round(tmp_path, z, is_told):
    """At z = q n = 30, the noise is as large as all clipped gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dpexp.Private(model, optimizer, plan_of(model, z), tmp_path / "ledger.jsonl")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        next(iter(private.rounds(records())))
    found = [str(one.message) for one in said if "so much noise" in str(one.message)]
    assert [one.partition(" that ")[0] for one in found] == ["z = 31 is so much noise"] * is_told


def test_a_loop_and_a_trainer_give_the_same_weights_and_ledger(tmp_path):
    module = Module()
    callback = dpexp.PrivacyCallback(plan_of(module), tmp_path / "trainer.jsonl", noise_seed=3)
    trainer(callback).fit(module, DataLoader(records(), 64))
    loop = Loop(tmp_path / "loop.jsonl")
    loop.run()
    for own, trained in zip(loop.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(own, trained) and not torch.equal(own, torch.zeros_like(own))
    ledgers = [dpexp.read_ledger(tmp_path / f"{name}.jsonl") for name in ("loop", "trainer")]
    assert ledgers[0].rounds == ledgers[1].rounds
    assert loop.private.epsilon() == dpexp.epsilon(ledgers[0], delta=DELTA)


def test_what_a_killed_loop_released_after_its_checkpoint_is_counted(tmp_path):
    loop = Loop(tmp_path / "ledger.jsonl")
    samples = loop.private.rounds(records())
    for sample in samples:
        loop.private.step(loss_of, sample)
        if loop.private.rounds_done == 2:
            weights, _, private = loop.states()
        if loop.private.rounds_done == 5:
            break
    samples.close()
    again = Loop(tmp_path / "ledger.jsonl")
    again.model.load_state_dict(weights)
    again.private.load_state_dict(private)
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


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
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


X, Y = records().tensors


class Frame:
    """As pandas' DataFrame: rows of an array, found by column."""

    shape, ndim, keys = (N, 6), 2, ("a",)
    __len__ = lambda self: N  # noqa: E731
    __getitem__ = lambda self, column: {"a": X}[column]  # noqa: E731
    __array__ = lambda self, *_, **__: X.double().numpy()  # noqa: E731


@pytest.mark.parametrize(
    "data",
    [(X, Y), (X.numpy(), Y.numpy()), (X.double().numpy(), Y.numpy()), (X.double(), Y), (Frame(), Y)],
    ids=["tensors", "arrays", "arrays of float64", "tensors of float64", "a frame"],
)
def test_arrays_and_tensors_are_taken_as_a_data_set(tmp_path, data):
    loops = [Loop(tmp_path / f"{name}.jsonl") for name in ("own", "given")]
    for loop, dataset in zip(loops, (records(), data), strict=True):
        loop.run(dataset=dataset)
    for own, given in zip(loops[0].model.parameters(), loops[1].model.parameters(), strict=True):
        assert torch.equal(own, given)


def test_arrays_that_are_no_data_set_are_refused_before_a_round(tmp_path):
    loop = Loop(tmp_path / "ledger.jsonl")
    with pytest.raises(dpexp.ConfigError, match=rf"it got parts of \[{len(X)}, {len(Y) - 1}\] rows\."):
        loop.private.rounds((X, Y[1:]))
    with pytest.raises(dpexp.ConfigError, match=r"takes one data set, as the tuple \(X, y\)"):
        loop.private.rounds(X, Y)


@pytest.mark.parametrize("of_arrays", [False, True])
def test_a_step_that_reads_the_arrays_it_trains_on_is_refused(tmp_path, of_arrays):
    """Also where the records are copies of them, in another type."""
    x, y = X.double(), Y
    given = (x.numpy(), y.numpy()) if of_arrays else (x, y)

    def centred(model, record):
        return F.cross_entropy(model(record[0] - x.mean(0).float()), record[1])

    loop = Loop(tmp_path / "ledger.jsonl")
    with pytest.raises(dpexp.ConfigError, match="reads the training data itself"):
        for sample in loop.private.rounds(given):
            loop.private.step(centred, sample)


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(records(), 32),
        iter(DataLoader(records(), 32)),
        map(tuple, X),
        {"x": X, "y": Y},
        Frame(),
        None,
    ],
    ids=["a loader", "its iterator", "an iterator", "a dict", "a frame", "nothing"],
)
def test_what_has_no_record_at_a_place_is_refused_before_a_round(tmp_path, data):
    loop = Loop(tmp_path / "ledger.jsonl")
    with pytest.raises(dpexp.ConfigError, match=rf"loader\.dataset\).* \(X, y\); it got a {type(data).__name__}\."):
        loop.private.rounds(data)
    assert not loop.private.ledger_path.exists()


def test_loops_go_on_where_the_plan_stands_until_its_rounds_are_done(tmp_path):
    loop = Loop(tmp_path / "ledger.jsonl", seed=None)
    private, left = loop.private, []
    for _ in range(3):
        left.append(len(private.rounds(records())))
        for sample in private.rounds(records()):
            private.step(loss_of, sample)
            if private.rounds_done == 2:
                break
    assert left == [6, 4, 0] and private.rounds_done == 6
    assert repr(private) == f"Private: 6 of 6 rounds done, ledger {tmp_path / 'ledger.jsonl'}"
    ledger = dpexp.read_ledger(tmp_path / "ledger.jsonl")
    assert ledger == private.plan.ledger() and private.epsilon() == dpexp.epsilon(ledger, delta=DELTA)
    with pytest.warns(UserWarning, match="the plan's 6 rounds are done, so that nothing more is trained") as told:
        assert [*private.rounds(records())] == []
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


def test_what_a_loop_changes_at_an_epochs_start_changes_the_step(tmp_path):
    model = network()
    model.gain = 1.0
    sampling, target = dpexp.FullBatch(steps=8), dpexp.Target(noise_multiplier=1e-7, delta=DELTA)
    plan = dpexp.make_plan(model, n=N, sampling=sampling, target=target)
    private = dpexp.Private(model, torch.optim.SGD(model.parameters(), 0.1), plan, tmp_path / "l.jsonl", noise_seed=3)
    moved = []
    for sample in private.rounds(records()):
        model.gain = float(private.rounds_done < 6)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        private.step(lambda model, record: model.gain * loss_of(model, record), sample)
        moved.append(float((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm()))
    assert min(moved[:6]) > 1e-3 and max(moved[6:]) < 1e-5


def test_records_of_different_lengths_are_padded_and_processed_together(tmp_path):
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return torch.full((i % 7 + 1,), i % 9 + 1), torch.tensor(i % 3)

    def collate(items):
        words = nn.utils.rnn.pad_sequence([words for words, _ in items], batch_first=True)
        shapes.add(words.shape[1])
        return words, torch.stack([y for _, y in items])

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, words):
            return self.head(self.words(words).sum(1))

    shapes: set[int] = set()
    loop = Loop(tmp_path / "ledger.jsonl", model=Bag(), pad_to=(4, 8))
    seen = []

    def step(model, record):
        seen.append(record[0].shape[-1])
        return loss_of(model, record)

    with pytest.warns(UserWarning, match="padded by collate to the next of the lengths 4, 8"):
        for sample in loop.private.rounds(Words(), collate_fn=collate):
            loop.private.step(step, sample)
    assert {*seen} <= {4, 8} <= shapes
    assert loop.private.rounds_done == 6


@pytest.mark.parametrize(
    ("lengths", "said"), [(6, r"16 records have \d shapes\..*pad_to"), (99, "one at a time.*pad_to")]
)
def test_many_shapes_are_announced_before_the_first_round(tmp_path, lengths, said):
    rows = [(torch.ones(1 + i % lengths, 6), torch.tensor(i % 2)) for i in range(N)]
    loop = Loop(tmp_path / "ledger.jsonl", max_physical_batch_size=4)
    with pytest.warns(UserWarning, match=said):
        for sample in loop.private.rounds(rows, collate_fn=lambda items: torch.utils.data.default_collate(items)):
            loop.private.step(lambda model, record: F.cross_entropy(model(record[0]).mean(1), record[1]), sample)
            break


def test_a_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpexp.integrations.transformers import PrivateTrainer

    def its_trainer(name, **others):
        torch.manual_seed(0)
        sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        ids = torch.randint(20, (N, 6), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        args = transformers.TrainingArguments(
            str(tmp_path / name), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=2,
            eval_strategy="steps", eval_steps=3, logging_steps=2, learning_rate=0.01, **others,
        )  # fmt: skip
        options = {"noise_seed": 1}
        return PrivateTrainer(
            model, args, train_dataset=rows, eval_dataset=rows[:20], plan=plan_of(model), options=options
        )

    killed = its_trainer("job")
    kill_at(4, killed)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = its_trainer("job")
    assert resumed.train(resume_from_checkpoint=True).global_step == resumed.private.rounds_done == 6
    assert dpexp.read_ledger(tmp_path / "job" / "ledger.jsonl").training_rounds == 6
    assert [log["epsilon"] for log in resumed.state.log_history if "epsilon" in log][-1] == resumed.private.epsilon()
    assert [sum("eval_loss" in log for log in one.state.log_history) for one in (killed, resumed)] == [1, 1]
    other = its_trainer("other", gradient_accumulation_steps=2, per_device_train_batch_size=3)
    other.train()
    assert dpexp.read_ledger(tmp_path / "other" / "ledger.jsonl").training_rounds == 6
    assert other.private.options.max_physical_batch_size == 3
    card = (tmp_path / "other" / "checkpoint-6" / "README.md").read_text()
    assert "**Not private**: the noise seed is known." in card and "ε" not in card


def test_a_trainer_of_transformers_keeps_the_newest_and_the_best_checkpoint_and_loads_the_best(tmp_path):
    """Also where it goes on after it was killed; the first evaluations are better, as the rate grows."""
    from transformers import TrainerCallback

    class Worse(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **_):
            metrics["eval_loss"] = [5, 1, 2, 3, 4, 4][state.global_step - 1]

    def its():
        return small_trainer(
            tmp_path, [Worse()], learning_rate=0.01, eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, load_best_model_at_end=True, save_total_limit=1,
        )  # fmt: skip

    killed = its()
    kill_at(4, killed)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    resumed = its()
    resumed.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    saved, last = (
        torch.load(tmp_path / f"checkpoint-{step}" / "private.pt", weights_only=True)["weights"] for step in (2, 6)
    )
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, saved[name]) and not torch.equal(p, last[name])
    again = its()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 10
    assert "10 rounds with sampling" in (tmp_path / "checkpoint-6" / "README.md").read_text()


def small_trainer(folder, callbacks=(), model=None, **arguments):
    """A PrivateTrainer of a tiny GPT-2 on its own texts, for six rounds in epochs of ten."""
    transformers = pytest.importorskip("transformers")
    from dpexp.integrations.transformers import PrivateTrainer

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = model or transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(20, (N, 6))]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(folder), **quiet | arguments)
    return PrivateTrainer(
        model, args, train_dataset=rows, eval_dataset=rows[:20], plan=plan_of(model), callbacks=[*callbacks]
    )


def test_a_trainer_of_transformers_calls_all_events_in_their_order(tmp_path):
    from transformers import TrainerCallback

    class Note(TrainerCallback):
        def __init__(self):
            self.called, self.released = [], []

        def __getattribute__(self, name):
            if name.startswith("on_"):
                self.called.append(name)
            return super().__getattribute__(name)

        def on_pre_optimizer_step(self, args, state, control, model, optimizer, **_):
            self.released.append(float(optimizer.param_groups[0]["params"][0].grad.norm()))

    note = Note()
    small_trainer(tmp_path, [note], logging_strategy="no").train()
    a_round = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    called = [name for name in note.called if name != "on_init_end"]
    assert called == ["on_train_begin", "on_epoch_begin", *6 * a_round, "on_epoch_end", "on_log", "on_train_end"]
    assert min(note.released) > 0


def test_a_trainer_of_transformers_lowers_its_rate_where_the_evaluation_stalls(tmp_path):
    its = small_trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, logging_steps=1, learning_rate=1e-5,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 1, "factor": 0.5},
    )  # fmt: skip
    its.train()
    rates = [log["learning_rate"] for log in its.state.log_history if "learning_rate" in log]
    assert rates == [1e-5, 1e-5, 1e-5, 5e-6, 5e-6, 2.5e-6]
    with pytest.warns(UserWarning, match="the plan's 6 rounds are done"):
        its.train()
    assert dpexp.read_ledger(tmp_path / "ledger.jsonl").training_rounds == 6


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_a_trainer_of_transformers_refuses_what_joins_rows(tmp_path, name):
    its = small_trainer(tmp_path)
    setattr(its.args, name, True)
    with pytest.raises(dpexp.ConfigError, match=f"{name}=True joins several rows"):
        its.train()


def test_adapters_whose_ranks_are_chosen_as_they_train(tmp_path):
    """AdaLoRA, whose callback reads p.grad: the noisy average."""
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

    class Allocate(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            model.base_model.update_and_allocate(state.global_step)

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=6, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), config)
    its = small_trainer(tmp_path, [Allocate()], model)
    its.train()
    assert its.private.rounds_done == 6 and model.peft_config["default"].rank_pattern


def kill_at(step, trainer):
    """Interrupts a training after a step of which a checkpoint was saved."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == step:
                raise KeyboardInterrupt

    trainer.add_callback(Interrupt())


def test_of_networks_that_take_turns_the_critic_is_private_while_the_generator_learns(tmp_path):
    """Each release is that of the critic's loss with the present generator, and a record moves it by at most S = 1."""

    def first_and_last_release(x):
        torch.manual_seed(1)
        generator, critic = (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, d)) for d in (2, 1))
        optimizers = torch.optim.SGD(critic.parameters(), 0.1), torch.optim.SGD(generator.parameters(), 0.1)
        z, path = torch.randn(5, 2), tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"

        def critics_loss(critic, record):
            return F.softplus(-critic(record[0])).mean() + F.softplus(critic(generator(z).detach())).mean()

        def clipped_gradient(record):
            found = torch.autograd.grad(critics_loss(critic, (record[None],)), [*critic.parameters()])
            flat = torch.cat([g.flatten() for g in found])
            return flat / flat.norm().clamp(min=1)

        sampling, target = dpexp.FullBatch(steps=3), dpexp.Target(noise_multiplier=1e-7, delta=DELTA)
        private = dpexp.Private(
            critic, optimizers[0], dpexp.make_plan(critic, n=10, sampling=sampling, target=target), path, noise_seed=3
        )
        found = []
        for sample in private.rounds(TensorDataset(x)):
            before, expected = nn.utils.parameters_to_vector(critic.parameters()), sum(map(clipped_gradient, x))
            private.step(critics_loss, sample)
            found.append((before - nn.utils.parameters_to_vector(critic.parameters())).detach() * 10 / 0.1)
            assert torch.allclose(found[-1], expected, atol=1e-4)
            F.softplus(-critic(generator(z))).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        return found[0], found[-1]

    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    (first, last), (other, _) = first_and_last_release(x), first_and_last_release(torch.cat([x[:-1], 1e3 * x[-1:]]))
    without, _ = first_and_last_release(x[:-1])
    assert not torch.allclose(first, last, atol=1e-3)
    assert max((first - without).norm(), (other - without).norm()) <= 1 + 1e-4


def test_a_trainer_of_transformers_computes_losses_in_bf16(tmp_path):
    """As a model does whose forward is under autocast; evaluations before and between the rounds change nothing."""
    transformers = pytest.importorskip("transformers")

    class InHalf(transformers.GPT2LMHeadModel):
        def forward(self, *args, **others):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(*args, **others)

    def weights_of(kind, **arguments):
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
        trainer = small_trainer(tmp_path / kind.__name__ / "_".join(arguments), (), kind(config), **arguments)
        trainer._options = {"noise_seed": 1}
        if arguments.get("bf16"):
            trainer.evaluate()
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    usual = {"learning_rate": 0.01, "remove_unused_columns": False, "eval_strategy": "steps", "eval_steps": 2}
    found, expected, other = (
        weights_of(kind, **usual, **arguments)
        for kind, arguments in (
            (transformers.GPT2LMHeadModel, {"bf16": True}),
            (InHalf, {}),
            (transformers.GPT2LMHeadModel, {}),
        )
    )
    assert torch.equal(found, expected) and not torch.equal(found, other)
    with pytest.raises(dpexp.ConfigError, match="fp16=True scales gradients by the data"):
        weights_of(transformers.GPT2LMHeadModel, fp16=True)


def test_gradient_checkpointing_of_a_trainer_is_two_runs_of_low_memory(tmp_path):
    transformers = pytest.importorskip("transformers")
    weights, memories = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
        if checkpointing:  # as scripts do by themselves
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        folder = tmp_path / str(checkpointing)
        usual = {"learning_rate": 0.01, "remove_unused_columns": False}
        trainer = small_trainer(folder, (), model, gradient_checkpointing=checkpointing, **usual)
        trainer._options = {"noise_seed": 1, "compile": False}
        trainer.train()
        memories.append(trainer.private.options.memory)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert memories == ["usual", "low"] and torch.equal(*weights)
