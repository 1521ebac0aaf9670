"""Prints what memory a private training takes, by the formula of docs/machines.md, beside what was measured.

    python benchmarks/memory.py [10M] [100M] [1B]     # computed; on meta tensors, at no cost
    python benchmarks/memory.py 10M --measure         # and measured here, on the CPU, each in a process of its own

Decoders of 128 positions in float32, SGD with momentum, tuned whole or by the head alone.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpexp import FullBatch, Target, make_plan

SIZES = {"10M": (320, 8), "100M": (768, 14), "1B": (2048, 20)}  # width, layers
T, VOCABULARY, HEAD_DIM = 128, 1000, 64
OPTIMIZER = {"SGD": 0, "momentum": 1, "Adam": 2}  # numbers of state for each trained one
MIB, GIB = 2**20, 2**30


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // HEAD_DIM, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def per_record(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes of one record x [1, T], which may be on the meta device: of what the backward pass keeps, and of the output
    gradients of layers that are trained."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}
    gradients = 0

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return t

    def look(layer: nn.Module, given: object, output: object) -> None:
        nonlocal gradients
        if isinstance(output, Tensor) and any(p.requires_grad for p in layer.parameters(recurse=False)):
            gradients += output.numel() * output.element_size()

    hooks = [layer.register_forward_hook(look) for layer in model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        held = loss(model, x)  # while it lives, so does what is kept
    for hook in hooks:
        hook.remove()
    del held
    return sum(kept.values()), gradients


def computed(model: nn.Module, x: Tensor, optimizer: str, physical_batch: int) -> dict[str, int]:
    """Bytes at the peak of a round."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    activations, gradients = per_record(model, x)
    parts = {
        "weights, and their copy": 2 * weights,
        "sums": trained,
        "optimizer, and its copy": 2 * OPTIMIZER[optimizer] * trained,
        "activations": physical_batch * activations,
        "captured output gradients": physical_batch * gradients,
    }
    return parts | {"all": sum(parts.values())}


def built(size: str, tuning: str, device: str) -> tuple[nn.Module, Tensor]:
    with torch.device(device):
        model, x = Decoder(*SIZES[size]), torch.zeros(1, T, dtype=torch.long)
    if tuning == "head":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    return model, x


def resident(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


def measured(size: str, tuning: str, physical_batch: int) -> int:
    """Bytes beyond imports at the peak of two rounds, in this process."""
    import tempfile

    import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    from dpexp.privacy.callback import PrivacyCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = built(size, tuning, "cpu")

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return loss(self.model, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

    before = resident("VmRSS")
    module = Module()
    plan = make_plan(
        module,
        n=physical_batch,
        sampling=FullBatch(steps=2),
        target=Target(noise_multiplier=1.0),
    )
    records = DataLoader(TensorDataset(torch.randint(VOCABULARY, (physical_batch, T))), batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        privacy = PrivacyCallback(plan, Path(folder) / "ledger.jsonl", max_physical_batch_size=physical_batch)
        pl.Trainer(
            max_epochs=-1, callbacks=[privacy], logger=False, accelerator="cpu", enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
        ).fit(module, records)  # fmt: skip
    return resident("VmHWM") - before


def main(sizes: list[str], measure: bool) -> None:
    print(
        "| model | tuned | physical batch | weights, copy | sums | optimizer, copy | a record | computed | measured |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for size in sizes:
        for tuning in ("all", "head"):
            for physical_batch in (1, 16, 64):
                model, x = built(size, tuning, "meta")
                parts = computed(model, x, "momentum", physical_batch)
                weights, sums, state, *of_records, total = parts.values()
                found = ""
                if measure and physical_batch < 64:
                    command = [sys.executable, __file__, size, "--peak-of", tuning, str(physical_batch)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    found = f"{int(done.stdout.split()[-1]) / GIB:.2f} GiB"
                cells = [size, tuning, physical_batch, *(f"{part / MIB:.0f} MiB" for part in (weights, sums, state))]
                cells += [f"{sum(of_records) / physical_batch / MIB:.1f} MiB", f"{total / GIB:.2f} GiB", found]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--peak-of", nargs=2, metavar=("TUNING", "BATCH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak_of:
        print(measured(given.sizes[0], given.peak_of[0], int(given.peak_of[1])))
    else:
        main(given.sizes, given.measure)
