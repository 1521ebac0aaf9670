"""Prints the bytes that a private pass holds at once, beside those of a plain forward and backward pass.

    python benchmarks/alive.py                              # 12 blocks of width 768, T 512, B 8, in a minute
    python benchmarks/alive.py decoder cnn wrn --width 256  # the models of benchmarks/workloads.py, too

Counted are the storages of results that are still needed, at the worst operator of each graph, on fake tensors: what a
caching allocator needs besides weights, without the workspace of single kernels. A decoder with an untied head of 1000
classes in float32, tuned whole or by LoRA of rank 8.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from report import head, parser, row
from torch import Tensor, fx, nn
from torch.nn import functional as F
from workloads import WORKLOADS

from dpexp import FullBatch, Target, make_plan
from dpexp._torch_compat import FakeTensorMode, proxy_tensor, quick_tracing
from dpexp.privacy.gradients import graph as graphs
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.compiled import MARK
from dpexp.privacy.gradients.lifted import Lifted
from dpexp.privacy.gradients.one_record import trace_one
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.gradients.two_runs import two_runs
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.round import RoundEngine

VOCABULARY, HEAD_DIM, RANK, MIB = 1000, 64, 8, 2**20


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, width: int, linear: type) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEAD_DIM)).movedim(-3, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, length: int, lora: bool) -> None:
        super().__init__()
        linear = (lambda *sizes: Lora(nn.Linear(*sizes))) if lora else nn.Linear
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, linear) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for part in (self.tokens, self.places, self.norm, self.head, *(block.norms for block in self.blocks)):
            part.requires_grad_(not lora)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))


def loss(model: Callable[..., Tensor], records: Sequence[Tensor]) -> Tensor:
    *inputs, y = records
    return F.cross_entropy(model(*inputs).flatten(0, -2), y.flatten())


class Sizes(fx.Interpreter):
    """Notes the storages of each node's results."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.of: dict[fx.Node, dict[int, int]] = {}

    def run_node(self, node: fx.Node) -> object:
        found = self.env[node.args[0]] if node.target is MARK else super().run_node(node)
        several = found if isinstance(found, list | tuple) else [found]
        storages = [one.untyped_storage() for one in several if isinstance(one, Tensor)]
        self.of[node] = {storage._cdata: storage.nbytes() for storage in storages}
        return found


def alive(module: fx.GraphModule, inputs: list[Tensor]) -> int:
    """The largest number of bytes that a graph's nodes hold at once, inputs and constants not counted."""
    sizes = Sizes(module)
    with torch.no_grad():
        sizes.run(*inputs)
    nodes = [*module.graph.nodes]
    place = {node: k for k, node in enumerate(nodes)}
    given = {one for node in nodes if node.op in ("placeholder", "get_attr") for one in sizes.of[node]}
    spans: dict[int, list[int]] = {}  # of each storage: its first and last node, and its bytes
    for node in nodes[:-1]:
        for storage, size in sizes.of[node].items():
            if storage not in given:
                span = spans.setdefault(storage, [place[node], place[node], size])
                span[1] = max(span[1], *(place[user] for user in node.users), place[node])
    changes = [0] * (len(nodes) + 1)
    for first, last, size in spans.values():
        changes[first] += size
        changes[last + 1] -= size
    return max(accumulate(changes))


def plain(model: nn.Module, records: Sequence[Tensor]) -> int:
    """Bytes of a forward and backward pass."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = dict([*model.named_parameters(), *model.named_buffers()])

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(state, inputs, strict=False))
        own |= {name: own[name].detach().requires_grad_() for name in trained}
        total = loss(lambda *x: torch.func.functional_call(model, own, x), inputs[len(state) :])
        return total.detach(), *torch.autograd.grad(total, [own[name] for name in trained])

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    given = [fake.from_tensor(t.detach(), static_shapes=True) for t in (*state.values(), *records)]
    with fake:
        with quick_tracing():
            module = proxy_tensor.make_fx(gradients)(*given)
        for node in [*module.graph.nodes]:
            if node.target is torch.ops.aten.detach.default:
                node.replace_all_uses_with(node.args[0])
        module.graph.eliminate_dead_code()
        return alive(module, given)


def private(model: nn.Module, records: Sequence[Tensor]) -> tuple[int, int, int]:
    """Bytes of a private pass in one run, and of each of two."""
    size = len(records[0])
    plan = make_plan(model, n=size, sampling=FullBatch(steps=2), target=Target(noise_multiplier=1.0))
    step = RoundEngine(plan, model, GaussianNoise()).step
    chunk = Chunk.of(TrainingStep.of(loss, model), [t[:, None] for t in records], size)
    one = trace_one(step.alone.parameters, chunk, step.alone.values)
    lifted, clip = Lifted(one), step._clip
    bounds, k = clip.bounds((), records[0].device), len(one.specs)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [*one.inputs.tensors(), bounds, torch.ones(size, dtype=torch.bool), *chunk.tensors]
    given = [fake.from_tensor(t.detach(), static_shapes=True) for t in inputs]

    def run(inputs: list[Tensor]) -> dict[str, Tensor]:
        return clip.clipped_sums(lifted(inputs[:k], inputs[k + 2 :]), inputs[k], inputs[k + 1], one.draws)

    with torch.no_grad(), fake:
        graph = graphs.trace(run, given, k, one.draws)
        first, second = two_runs(graph.run, graph.outputs)
        others = [torch.empty_like(t) for name, t in run(given).items() if not name.startswith("sum:")]
        return alive(graph.run, given), alive(first, given), alive(second, [*given, *others])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", nargs="*", default=["decoder", "decoder_lora"], help=f"or {', '.join(WORKLOADS)}")
    for name, default in (("width", 768), ("layers", 12), ("length", 512), ("batch", 8)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    x = torch.randint(VOCABULARY, (given.batch, given.length))
    print(head("model (B)", "plain, MiB", "one run", "norms", "sums", "one run, of plain", "two runs, of plain"))
    for name in given.models:
        if name in WORKLOADS:
            model, records = WORKLOADS[name].build(), WORKLOADS[name].data(WORKLOADS[name].batch)
        else:
            model, records = Decoder(given.width, given.layers, given.length, name == "decoder_lora"), (x, x)
        of_plain, one, norms, sums = (found / MIB for found in (plain(model, records), *private(model, records)))
        cells = (f"{mib:.0f}" for mib in (of_plain, one, norms, sums))
        shares = (f"{mib / of_plain:.2f}" for mib in (one, max(norms, sums)))
        print(row(f"{name} ({len(records[0])})", *cells, *shares), flush=True)


if __name__ == "__main__":
    main()
