"""Steps of ordinary training code: records together have the gradients that each has alone, by ordinary autograd."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpexp._transformers_compat import trained_privately
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.per_example import VmapPass, gradients_of_one_record
from dpexp.privacy.plan.groups import trainable
from dpexp.privacy.private_metrics import Values

B, T, D = 5, 6, 3


def assert_gradients_equal(module, loss_of, batch):
    """Each record's gradients in a pass of the chunk are those of the record alone, in float64."""
    parameters = {**trainable(module)}
    values = Values({}, next(iter(parameters.values())))
    chunk = Chunk.of(loss_of, tuple(t.unsqueeze(1) for t in batch), B)
    found = VmapPass(module, parameters, values)(chunk)
    assert found.in_range.all()
    for i in range(B):
        alone, loss = gradients_of_one_record(loss_of, tuple(t[i : i + 1] for t in batch), parameters, values)
        assert found.losses[i].item() == pytest.approx(loss.item(), rel=1e-12)
        assert found.by_name.keys() == alone.keys()
        for name, gradient in alone.items():
            together = found.by_name[name].materialize()[i]
            torch.testing.assert_close(together, gradient, rtol=1e-9, atol=1e-12, msg=f"{name} of record {i}")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sequences():
    return torch.randn(B, T, D, dtype=torch.float64), torch.tensor([6, 3, 1, 4, 3])


class Packed(nn.Module):
    """A recurrent layer over the first positions of x [1, T, D], with or without first states."""

    def __init__(self, kind, states=False, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(D, 4, batch_first=True, **options).double()
        ends = (2 if options.get("bidirectional") else 1) * options.get("num_layers", 1)
        self.state = nn.Parameter(torch.randn(ends, 1, 4, dtype=torch.float64)) if states else None

    def forward(self, x, length):
        packed = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        state = self.state if self.state is None or not isinstance(self.layer, nn.LSTM) else (self.state, self.state**2)
        outputs, last = self.layer(packed, state)
        padded, lengths = pad_packed_sequence(outputs, batch_first=True, total_length=T)
        ends = torch.cat([h.flatten() for h in (last if isinstance(last, tuple) else (last,))])
        return padded.sin().sum() + (padded[:, lengths - 1] ** 2).sum() + (ends**3).sum()


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_packed_sequences(kind, options, states):
    module = Packed(kind, states, **options)
    assert_gradients_equal(module, lambda batch: module(*batch), sequences())


@pytest.mark.parametrize(
    "use",
    [
        lambda packed: packed.data.mean(),
        lambda packed: packed.data.mean() * len(packed.batch_sizes),
        lambda packed: packed.data.sum() / packed.data.size(0),
        lambda packed: packed.data.sum() / packed.data.shape[0],
        lambda packed: packed.data.sum() / packed.batch_sizes.sum(),
        lambda packed: pad_packed_sequence(packed, batch_first=True)[0].mean(),
        lambda packed: PackedSequence(packed.data.relu(), packed.batch_sizes).data.sum(),
    ],
)
def test_other_uses_of_packed_sequences_run_one_record_at_a_time(use):
    module = nn.LSTM(D, 4, batch_first=True).double()

    def loss_of(batch):
        return use(module(pack_padded_sequence(*batch, batch_first=True, enforce_sorted=False))[0])

    with pytest.raises(RuntimeError, match=r"one record at a time|each record its own length"):
        assert_gradients_equal(module, loss_of, sequences())


def test_an_invalid_length_concerns_its_record_alone_and_padding_may_hold_anything():
    module, (x, length) = Packed("GRU"), sequences()
    assert_gradients_equal(module, lambda batch: module(*batch), (x.masked_fill(after(length), torch.nan), length))
    batch = x, torch.tensor([6, 0, 7, 2, -1])
    chunk = Chunk.of(lambda batch: module(*batch), tuple(t.unsqueeze(1) for t in batch), B)
    found = VmapPass(module, {**trainable(module)}, Values({}, module.layer.weight_hh_l0))(chunk)
    assert found.in_range.tolist() == [True, False, False, True, False]


def test_two_packed_sequences_are_not_mixed():
    module = nn.GRU(D, 4, batch_first=True).double()

    def loss_of(batch):
        x, length = batch
        long, short = (
            pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False) for n in (length, length // 2 + 1)
        )
        return module(PackedSequence(long.data, short.batch_sizes))[1].sum()

    with pytest.raises(RuntimeError, match="one record at a time"):
        assert_gradients_equal(module, loss_of, sequences())


def test_a_penalty_on_the_gradient_of_a_packed_sequence_runs_one_record_at_a_time():
    module = Packed("LSTM")

    def loss_of(batch):
        x = batch[0].clone().requires_grad_()
        return torch.autograd.grad(module(x, batch[1]), x, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match="one record at a time"):
        assert_gradients_equal(module, loss_of, sequences())


def after(length):
    return (torch.arange(T) >= length[:, None])[..., None]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss(reduction, zero_infinity):
    module = nn.Linear(D, 4).double()
    x, _ = sequences()
    batch = x, torch.randint(1, 4, (B, 3)), torch.tensor([6, 5, 6, 4, 6]), torch.tensor([3, 2, 1, 2, 3])

    def loss_of(batch):
        x, y, *lengths = batch
        scores = module(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, *lengths, reduction=reduction, zero_infinity=zero_infinity)

    assert_gradients_equal(module, loss_of, batch)


def test_ctc_of_an_impossible_alignment_keeps_the_rest_of_the_loss():
    module = nn.Linear(D, 4).double()
    x, _ = sequences()

    def loss_of(batch):
        x, y, lengths = batch
        scores = module(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, lengths, torch.full((1,), 3), zero_infinity=True) + module(x).square().sum()

    assert_gradients_equal(module, loss_of, (x, torch.randint(1, 4, (B, 3)), torch.tensor([6, 1, 2, 6, 5])))


def test_a_length_of_ctc_out_of_range_concerns_its_record_alone():
    module = nn.Linear(D, 4).double()
    x, _ = sequences()
    lengths = torch.tensor([3, 2, 9, 2, -1])

    def loss_of(batch):
        scores = module(batch[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch[1], torch.full((1,), T), batch[2])

    chunk = Chunk.of(loss_of, tuple(t.unsqueeze(1) for t in (x, torch.randint(1, 4, (B, 3)), lengths)), B)
    found = VmapPass(module, {**trainable(module)}, Values({}, module.weight))(chunk)
    assert found.in_range.tolist() == [True, True, False, True, False]


def network():
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def fgsm(net, x, y):
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
    return F.cross_entropy(net((x + 0.1 * gradient.sign()).detach()), y)


def pgd(net, x, y):
    delta = torch.zeros_like(x)
    for _ in range(2):
        delta.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x + delta), y), [delta])
        delta = delta.detach() + 0.1 * gradient
    return F.cross_entropy(net(x + delta), y)


def gradient_penalty(net, x, y):
    x.requires_grad_()
    out = net(x)
    gradient = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return F.cross_entropy(out, y) + (gradient.norm(2, 1) - 1).square().mean()


def second_derivative(net, x, y):
    x.requires_grad_()
    first = torch.autograd.grad(net(x)[:, 0].sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
    return (second[:, 0] + first[:, 1] * y).square().mean()


@pytest.mark.parametrize("step", [fgsm, pgd, gradient_penalty, second_derivative])
def test_gradients_that_the_step_takes(step):
    net = network()
    batch = torch.randn(B, D, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    assert_gradients_equal(net, lambda batch: step(net, *batch), batch)


def test_gradients_that_the_step_takes_through_a_recurrent_layer():
    layer = nn.GRU(D, 4, batch_first=True).double()

    def loss_of(batch):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
        return layer(x.detach() + gradient)[1].sum()

    assert_gradients_equal(layer, loss_of, sequences()[:1])


@pytest.mark.parametrize(
    "inputs", [lambda net: net[0].weight, lambda net: torch.zeros(1, D, dtype=torch.float64).requires_grad_()]
)
def test_gradients_of_what_all_records_share_run_one_record_at_a_time(inputs):
    net = network()

    def loss_of(batch):
        shared = inputs(net)
        x = batch[0] + shared if shared.shape == batch[0].shape else batch[0]
        return torch.autograd.grad(net(x).square().sum(), shared)[0].sum() + net(x).sum()

    with pytest.raises(RuntimeError, match="one record at a time"):
        assert_gradients_equal(net, loss_of, (torch.randn(B, D, dtype=torch.float64),))


class LastState(nn.GRU):
    def forward(self, x):
        return super().forward(x[None])[1]


@pytest.mark.parametrize("first", [lambda: nn.Linear(D, 5), lambda: LastState(D, 5)])
def test_a_parameter_that_is_exempt_for_a_while(first):
    net = nn.Sequential(first(), nn.Linear(5, 2)).double()

    def loss_of(batch):
        net[0].requires_grad_(False)
        frozen = net(batch[0]).square().sum()
        net[0].requires_grad_(True)
        return frozen + net(batch[0]).sum()

    assert_gradients_equal(net, loss_of, (torch.randn(B, D, dtype=torch.float64),))
    assert all(p.requires_grad for p in net.parameters())


def test_uninitialized_memory_holds_no_record():
    net = network()
    parameters, values = {**trainable(net)}, Values({}, net[0].weight)

    def loss_of(batch):
        return net(batch[0] + torch.empty(1, D, dtype=torch.float64)).sum()

    x = torch.randn(B, D, dtype=torch.float64)
    assert gradients_of_one_record(loss_of, (x[:1],), parameters, values)[1].isnan()
    assert VmapPass(net, parameters, values)(Chunk.of(loss_of, (x.unsqueeze(1),), B)).losses.isnan().all()


def test_distributions_draw_for_each_record():
    net = nn.Linear(D, 2).double()

    def loss_of(batch):
        mean, scale = net(batch[0]).chunk(2, -1)
        q = Normal(mean, scale.exp())
        return q.rsample().square().sum() + kl_divergence(q, Normal(torch.zeros_like(mean), 1.0)).sum()

    chunk = Chunk.of(loss_of, torch.ones(B, 1, D, dtype=torch.float64), B)
    losses = VmapPass(net, {**trainable(net)}, Values({}, net.weight))(chunk).losses
    assert len(losses.unique()) == B  # equal records, other draws


def in_place(net, x):
    total = torch.zeros(len(x), dtype=x.dtype)
    total += net(x).sum(1)
    return total.mean()


def in_parts(net, x):
    parts = net[0].weight.new_zeros(3, len(x), 2)
    for k in range(3):
        parts[k] = net(x * k)
    return (parts**2).sum()


def shuffled(net, x):
    order = torch.tensor([2, 0, 1])
    filled = torch.full((len(x), D, 1), 0.5, dtype=x.dtype)
    filled[torch.arange(len(x))[:, None], order] = x[:, :, None]
    return net(filled[..., 0]).sin().sum()


def as_new(net, x):
    return net(torch.tensor(data=x, dtype=torch.float64)).sin().sum() + net(torch.tensor(x)).sum()


def one_hot(net, x):
    chosen = torch.zeros(len(x), 2, dtype=x.dtype).scatter_(1, x.argmax(1, keepdim=True) % 2, 1.0)
    return (net(x) * chosen).sin().sum()


def of_data(net, x):
    return (net(x) * (x.data > 0).double().sum()).sin().sum()


def channels_last(net, x):
    image = x.view(len(x), 1, D, 1).to(memory_format=torch.channels_last)
    return net(image.contiguous(memory_format=torch.channels_last).flatten(1)).sin().sum()


def one_bag(net, x):
    table = nn.functional.embedding_bag(torch.tensor([3, 1, 3]), net[2], torch.tensor([0]), mode="sum", sparse=True)
    return (table * net(x)).sum()


@pytest.mark.parametrize("step", [in_place, in_parts, shuffled, as_new, one_hot, of_data, channels_last, one_bag])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_idioms_of_training_steps(step):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.table = nn.Linear(D, 2).double(), nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

        def __getitem__(self, k):
            return self.first if k == 0 else self.table

        def forward(self, x):
            return self.first(x).tanh()

    net = Net()
    assert_gradients_equal(net, lambda batch: step(net, batch[0]), (torch.randn(B, D, dtype=torch.float64),))


def by_one_mask(net, x, y):
    mask = y > 0
    scores, labels = torch.masked_select(net(x)[..., 0].sigmoid(), mask), y[mask]
    return F.binary_cross_entropy(scores, labels.double() / 2) + (scores.log() * 2 - 1).pow(2).mean()


def by_places(net, x, y):
    places = torch.where(y != 0)
    scores = net(x)[..., 0]
    return F.binary_cross_entropy_with_logits(scores[places], torch.ones_like(scores)[places])


def of_classes(net, x, y):
    mask = y != 1
    return F.cross_entropy(net(x)[mask], y[mask]) + F.nll_loss(net(x)[mask].double() * 2, y[mask], reduction="sum")


def of_some_classes(net, x, y):
    mask = x[..., 0] > -1
    return F.cross_entropy(net(x)[mask], y.masked_fill(y == 2, -100)[mask])


def of_rows(net, x, y):
    mask = y > 0
    right = 1 - ((net(x)[..., 0][mask] > 0.1).long() == y[mask]).double().mean()
    return F.l1_loss(net(x)[mask], torch.zeros_like(net(x))[mask]) + (net(x)[mask] - 1).abs().mean() * (1 + right)


def with_infinite_derivatives(net, x, y):
    h, w = net(x)[..., 0].exp(), net.bias[0].exp()
    a = h[y != 0]
    entropy = (a / a.sum() * (a / a.sum()).log()).sum()
    return (a * w).log().mean() + (a * w).sqrt().sum() + a.log().mean() * w + F.mse_loss(a.log(), w) + entropy


def labels_from_1(net, x, y):
    mask, scores, some = y != 0, net(x), y + 1
    p = scores[..., 0].sigmoid()
    binary = F.binary_cross_entropy(p[mask], (some[mask] - 1).double() / 2)
    return F.cross_entropy(scores[mask], some[mask] - 1) + binary


SELECTIONS = [by_one_mask, by_places, of_classes, of_some_classes, of_rows, with_infinite_derivatives, labels_from_1]


@pytest.mark.parametrize("step", SELECTIONS)
def test_entries_selected_by_a_mask(step):
    net = nn.Linear(D, 3).double()
    x, y = torch.randn(B, T, D, dtype=torch.float64), torch.randint(3, (B, T))
    x[:, 0, 0], y[:, 0], y[:, 1] = 1.0, 0, 2
    assert_gradients_equal(net, lambda batch: step(net, *batch), (x, y))


def caught(count):
    try:
        return count()
    except Exception:
        return -1


def added_in_place(entries):
    entries += 1
    return entries


def written_after(places, mask):
    mask.logical_not_()
    return places


@pytest.mark.parametrize(
    "use",
    [
        lambda entries, mask: entries.softmax(0).max(),
        lambda entries, mask: entries.sum() * len(entries),
        lambda entries, mask: (entries * torch.ones(3, dtype=torch.float64)).sum(),
        lambda entries, mask: (entries - entries.flip(0)).pow(2).sum(),
        lambda entries, mask: entries.cumsum(0).sum(),
        lambda entries, mask: entries.view(-1, 1).sum(),
        lambda entries, mask: torch.cat([entries, entries]).mean(),
        lambda entries, mask: F.mse_loss(entries, entries[mask[mask]]),
        lambda entries, mask: F.cross_entropy(entries, entries.softmax(0)),
        lambda entries, mask: entries.mean(0, keepdim=True).sum(),
        lambda entries, mask: F.mse_loss(entries, torch.ones(1, T, 1, dtype=torch.float64)[mask]),
        lambda entries, mask: torch.zeros(1, T).index_put_(torch.where(mask), torch.ones(())).sum() * entries.sum(),
        lambda entries, mask: entries.sum() if entries == 0 else -entries.sum(),
        lambda entries, mask: entries.sum() * len(torch.where(mask)[0]),
        lambda entries, mask: (entries * mask.logical_not_().sum()).sum(),
        lambda entries, mask: caught(lambda: len(entries)) * entries.sum(),
        lambda entries, mask: caught(lambda: entries.shape[0]) * entries.sum(),
        lambda entries, mask: caught(lambda: [*entries]) * entries.sum(),
        lambda entries, mask: setattr(entries, "data", entries.detach()) or entries.sum(),
        lambda entries, mask: added_in_place(entries).sum() + entries.sum(),
        lambda entries, mask: torch.ones(T, T)[torch.where(mask)[0]].sum() * entries.sum(),
        lambda entries, mask: torch.ones(1, T)[written_after(torch.where(mask), mask)].sum() * entries.sum(),
        lambda entries, mask: torch.masked_select(torch.ones(T, 1, T), mask).sum() * entries.sum(),
    ],
)
def test_what_needs_the_number_of_selected_entries_runs_one_record_at_a_time(use):
    net = nn.Linear(D, 1).double()

    def loss_of(batch):
        mask = batch[0][..., 0] > 0
        return use(net(batch[0])[..., 0][mask], mask)

    chunk = Chunk.of(loss_of, (torch.randn(B, 1, T, D, dtype=torch.float64),), B)
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        VmapPass(net, {**trainable(net)}, Values({}, net.weight))(chunk)


def test_a_probability_out_of_range_concerns_its_record_alone():
    net = nn.Linear(D, 1).double()
    x, y = torch.randn(B, D, dtype=torch.float64), torch.tensor([0.0, 1.0, 0.5, 2.0, torch.nan], dtype=torch.float64)
    loss_of = lambda batch: F.binary_cross_entropy(net(batch[0])[:, 0].sigmoid(), batch[1], reduction="sum")  # noqa: E731
    assert_gradients_equal(net, loss_of, (torch.cat([x[:3], x[:2]]), torch.cat([y[:3], y[:2]])))
    values = Values({}, net.weight)
    found = VmapPass(net, {**trainable(net)}, values)(Chunk.of(loss_of, (x[:, None], y[:, None]), B))
    assert found.in_range.tolist() == [True, True, True, False, False] and found.losses.isfinite().all()


@pytest.mark.parametrize("name", ["Mixtral"])
def test_experts_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20, num_key_value_heads=1, head_dim=4, **sizes, **experts
    )
    module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    module.set_experts_implementation("eager")  # the default takes no float64
    ids = torch.randint(20, (B, T))

    def loss_of(batch):
        return module(input_ids=batch[0], labels=batch[0]).loss

    losses = [loss_of((ids[i : i + 1],)).item() for i in range(B)]
    with pytest.warns(UserWarning, match="use_cache=False"), trained_privately(module):
        assert [loss_of((ids[i : i + 1],)).item() for i in range(B)] == pytest.approx(losses, rel=1e-9)
        assert_gradients_equal(module, loss_of, (ids,))
    assert module.config.use_cache


def test_a_bag_that_does_not_begin_at_0_concerns_its_record_alone():
    net = nn.EmbeddingBag(4, 2, mode="sum").double()
    loss_of = lambda batch: net(batch[0][0], batch[1][0]).sum()  # noqa: E731
    indices, offsets = torch.tensor([[1, 2, 0]] * 2), torch.tensor([[0], [1]])
    chunk = Chunk.of(loss_of, (indices[:, None], offsets[:, None]), 2)
    assert VmapPass(net, {**trainable(net)}, Values({}, net.weight))(chunk).in_range.tolist() == [True, False]


def test_strides_are_not_read_where_a_memory_format_was_asked_for():
    net = nn.Linear(4, 2).double()

    def loss_of(batch):
        image = batch[0].view(1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
        return net(image.as_strided((1, 4), (4, 1))).sum()

    chunk = Chunk.of(loss_of, (torch.randn(B, 1, 4, dtype=torch.float64),), B)
    with pytest.raises(RuntimeError, match="as_strided depends on the memory_format"):
        VmapPass(net, {**trainable(net)}, Values({}, net.weight))(chunk)


def test_a_selection_is_a_tensor_to_the_step():
    net = nn.Linear(D, 1).double()
    loss_of = lambda batch: (1 if torch.is_tensor(a := net(batch[0])[..., 0][batch[0][..., 0] > 0]) else -1) * a.sum()  # noqa: E731
    assert_gradients_equal(net, loss_of, (torch.randn(B, T, D, dtype=torch.float64),))
