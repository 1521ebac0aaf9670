"""K views of a record are one vector."""

import pytest
import torch
from reference import engine_of, norm_of, rows_of, sums_of
from torch import nn
from torch.nn import functional as F

from dpexp.errors import ConfigError, RecordError
from dpexp.training.classifier import FlipCrop, views

B, K = 6, 5
BORING = "pytorch_lightning.demos.boring_classes.BoringModel"
AUGMENT = FlipCrop(2)


def case(S, dtype=torch.float64):
    """An engine, its module, and images with labels."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    ).to(dtype)  # fmt: skip
    return engine_of(module, S, n=10, q=0.5), module, (torch.randn(B, 3, 8, 8, dtype=dtype), torch.randint(4, (B,)))


def augmented(module, one):
    x, y = views(one, AUGMENT, K)
    return F.cross_entropy(module(x), y)


def test_a_records_vector_is_the_mean_of_the_gradients_of_its_views():
    engine, module, (x, y) = case(S=1e6)
    torch.manual_seed(3)
    sums = sums_of(engine, augmented, (x, y))
    assert engine.step.mode == "traced"
    torch.manual_seed(3)
    drawn = torch.func.vmap(
        lambda one: torch.stack([AUGMENT(one) for _ in range(K)]), randomness="different"
    )(x)  # fmt: skip

    def gradients(x, y):
        loss = F.cross_entropy(module(x), y) * B
        return dict(zip(sums, torch.autograd.grad(loss, [*module.parameters()]), strict=True))

    expected = gradients(drawn.flatten(0, 1), y.repeat_interleave(K))
    assert norm_of(sums, expected) < 1e-12 * norm_of(expected)
    assert norm_of(sums, gradients(x, y)) > 0.01 * norm_of(expected)  # the views were other images


def test_a_record_of_many_views_moves_a_sum_by_at_most_S():
    """Its views are clipped together, not one by one: each alone is S long, and their mean no longer."""
    S = 0.01
    engine, _, (x, y) = case(S, torch.float32)
    for i in range(2):
        assert 0.99 * S < norm_of(sums_of(engine, augmented, rows_of((x, y), [i]))) <= S
    even = x.mean((2, 3), keepdim=True).expand_as(x).clone()  # views of which are equal, whatever is drawn
    whole = sums_of(engine, augmented, (even, y))
    for others in (range(1, B), [0, *range(2, B)]):
        assert 0.9 * S < norm_of(whole, sums_of(engine, augmented, rows_of((even, y), [*others]))) <= S * (1 + 1e-6)


def test_records_draw_views_of_their_own():
    torch.manual_seed(0)
    x = torch.arange(64.0).reshape(1, 1, 8, 8).expand(50, 1, 8, 8)
    rows = torch.func.vmap(
        lambda one: views((one[None],), FlipCrop(3), 4)[0], randomness="different"
    )(x).flatten(0, 1)  # fmt: skip
    assert len({tuple(view.flatten().tolist()) for view in rows}) > 80  # of 200, among 7 · 7 · 2


def test_views_are_all_crops_of_the_padded_image_and_of_its_mirror():
    def key(image):
        return tuple(image.flatten().tolist())

    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    crops, mirrored = (
        {key(wide[:, i : i + 5, j : j + 6]) for i in range(3) for j in range(3)}
        for wide in (F.pad(image, (1, 1, 1, 1), mode="reflect") for image in (x, x.flip(2)))
    )
    for flip, expected in ((True, crops | mirrored), (False, crops)):
        seen, _ = views((x[None], torch.zeros(1)), FlipCrop(1, flip=flip), 300)
        assert {key(view) for view in seen} == expected


def test_what_goes_with_x_is_repeated():
    x, y, w = views((torch.zeros(2, 1, 6, 6), torch.tensor([3, 4]), [1.0]), FlipCrop(), 3)
    assert x.shape == (6, 1, 6, 6) and y.tolist() == [3, 3, 3, 4, 4, 4] and w == [1.0]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: FlipCrop(-1), "augment.max_shift=-1"),
        (lambda: FlipCrop(4)(torch.zeros(20)), r"takes images \[C, H, W\].*shape \[20\]"),
        (lambda: FlipCrop(8)(torch.zeros(1, 8, 8)), "with more than max_shift pixels"),
        (lambda: views({"input_ids": torch.zeros(1, 5)}, FlipCrop()), "a batch of the data is a dict; set augment"),
    ],
)
def test_what_cannot_be_augmented_is_refused(make, words):
    with pytest.raises((ConfigError, RecordError), match=words):
        make()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("privacy", ["privacy.noise_multiplier=1", "privacy.enabled=false"])
def test_a_job_and_its_non_private_baseline_train_on_views(privacy, dpexp_job, monkeypatch):
    seen, crop = [], FlipCrop.__call__
    monkeypatch.setattr(FlipCrop, "__call__", lambda self, x: [seen.append(x.shape), crop(self, x)][1])
    views = ("augment=flip_crop", "augment.multiplicity=3", "augment.max_shift=1", "augment.flip=false")
    dpexp_job(*views, "model=logistic", "sampling.steps=2", "tracking=none", "accountant=moments", privacy)
    assert len(seen) >= 3 and set(seen) == {(1, 8, 8)}


@pytest.mark.parametrize(
    "overrides, words",
    [
        ("augment.multiplicity=4", "augment=none would repeat each record"),
        ("augment=flip_crop augment.multiplicity=0", "augment.multiplicity=0 must be an integer"),
        (f"augment=flip_crop model._target_={BORING} ~model.shape ~model.classes", "batch = dpexp.views"),
    ],
)
def test_what_a_job_cannot_augment_is_said_in_a_sentence(overrides, words, dpexp_job):
    with pytest.raises(SystemExit, match=words):
        dpexp_job("tracking=none", "sampling.steps=2", *overrides.split())
