"""Per-example gradient rules for torch functions.

A rule takes the arguments of a call for one record and returns a `LayerCall`: how to run the function on the whole
chunk, and how its input and output gradients give the `LayerGradient` of each parameter. `layer_rule` registers a rule,
also for functions of your own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    LayerGradient,
    outer_products,
    worth_storing,
)


@dataclass(frozen=True)
class LayerCall:
    """A call of a torch function with data and parameters as arguments.

    Attributes:
        input: the data argument, of one record.
        parameters: by role, such as weight and bias; None where absent.
        forward: input [B, ...], and by role the detached parameters -> output [B, ...].
        gradients: input [B, ...] and output gradient [B, ...] -> the `LayerGradient` of each role.
    """

    input: Tensor
    parameters: dict[str, Tensor | None]
    forward: Callable[..., Tensor]
    gradients: Callable[[Tensor, Tensor], dict[str, LayerGradient]]


Rule = Callable[..., LayerCall | None]
RULES: dict[Callable[..., Any], Rule] = {}


def layer_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Registers a rule for torch functions.

    The rule takes the functions' arguments and returns a `LayerCall`, or None if it does not cover them; the parameters
    are then copied for each record.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


@layer_rule(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LayerCall:
    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        x, g = _flatten_positions(x), _flatten_positions(g)
        return {"weight": outer_products(x, g), "bias": DenseGradient(_sum_positions(g))}

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.contiguous(), weight, bias)

    return LayerCall(input, {"weight": weight, "bias": bias}, forward, gradients)


@layer_rule(torch.addmm, Tensor.addmm)
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> LayerCall | None:
    """A linear layer whose weight is [d, p]."""
    if (beta, alpha, mat1.dim(), mat2.dim()) != (1, 1, 2, 2) or input.shape != mat2.shape[1:]:
        return None

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        return {"weight": outer_products(g, x), "bias": DenseGradient(_sum_positions(g))}

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x.flatten(0, 1), weight).view(*x.shape[:2], -1)

    return LayerCall(mat1, {"weight": mat2, "bias": input}, forward, gradients)


@layer_rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> LayerCall | None:
    if max_norm is not None or scale_grad_by_freq:
        return None

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        index, g = x.reshape(len(x), -1), _flatten_positions(g)
        return {"weight": EmbeddingGradient(index, _without_padding(g, index, padding_idx, len(weight)), len(weight))}

    return LayerCall(input, {"weight": weight}, lambda x, weight: F.embedding(x, weight), gradients)


@layer_rule(torch.embedding)
def torch_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> LayerCall | None:
    """In torch.embedding, a negative padding_idx means none."""
    padding = padding_idx if padding_idx >= 0 else None
    return embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


@layer_rule(Tensor.__getitem__)
def indexed_rows(table: Tensor, index: Any) -> LayerCall | None:
    """table[index]; negative indices count from the end."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or table.dim() != 2:
        return None
    return embedding(torch.where(index < 0, index + len(table), index), table) if table.requires_grad else None


@layer_rule(torch.index_select, Tensor.index_select)
def index_select(input: Tensor, dim: int, index: Tensor) -> LayerCall | None:
    return embedding(index, input) if input.dim() == 2 and dim in (0, -2) and index.dim() <= 1 else None


@layer_rule(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> LayerCall | None:
    """Only for bags of equal length, [bags, length], and for one bag with its offset."""
    if input.dim() == 1 and offsets is not None and offsets.shape == (1,) and not include_last_offset:
        input, offsets = input[None], None
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or mode == "max":
        return None
    if offsets is not None or per_sample_weights is not None:
        return None

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        bags = F.embedding_bag(x.flatten(0, 1), weight, mode=mode, padding_idx=padding_idx)
        return bags.unflatten(0, x.shape[:2])

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        if mode == "mean":
            counted = torch.ones_like(x) if padding_idx is None else x != padding_idx % len(weight)
            g = g / counted.sum(-1, keepdim=True).clamp(min=1)
        index = x.flatten(1)
        g = g[:, :, None].expand(*x.shape, -1).flatten(1, 2)
        return {"weight": EmbeddingGradient(index, _without_padding(g, index, padding_idx, len(weight)), len(weight))}

    return LayerCall(input, {"weight": weight}, forward, gradients)


@layer_rule(F.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> LayerCall:
    shape = tuple(normalized_shape)

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        x, g = (t.reshape(len(t), -1, *shape) for t in (x, g))
        return {
            "weight": DenseGradient(_sum_positions(F.layer_norm(x, shape, eps=eps) * g)),
            "bias": DenseGradient(_sum_positions(g)),
        }

    def forward(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return LayerCall(input, {"weight": weight, "bias": bias}, forward, gradients)


@layer_rule(F.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> LayerCall:
    shape = tuple(normalized_shape)

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        x, g = (t.reshape(len(t), -1, *shape) for t in (x, g))
        return {"weight": DenseGradient(_sum_positions(F.rms_norm(x, shape, eps=eps) * g))}

    return LayerCall(input, {"weight": weight}, lambda x, weight=None: F.rms_norm(x, shape, weight, eps), gradients)


@layer_rule(F.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> LayerCall:
    def normalize(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.group_norm(x.flatten(0, 1), num_groups, weight, bias, eps).view(x.shape)

    return _per_channel(input, weight, bias, normalize)


@layer_rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> LayerCall | None:
    if not use_input_stats or running_mean is not None:
        return None

    def normalize(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.instance_norm(x.flatten(0, 1), None, None, weight, bias, True, momentum, eps).view(x.shape)

    return _per_channel(input, weight, bias, normalize)


def _per_channel(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalize: Callable[..., Tensor]
) -> LayerCall:
    """A normalization of [B, N, C, *space] with one weight and bias per channel."""

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        dims = (1, *range(3, g.dim()))
        return {"weight": DenseGradient((normalize(x) * g).sum(dims)), "bias": DenseGradient(g.sum(dims))}

    return LayerCall(input, {"weight": weight, "bias": bias}, normalize, gradients)


@layer_rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> LayerCall | None:
    space = weight.dim() - 2
    dilation = _tuple(dilation, space)
    if padding == "same":
        margins = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(m % 2 for m in margins):
            return None
        padding = tuple(m // 2 for m in margins)
    padding = (0,) * space if isinstance(padding, str) else _tuple(padding, space)
    geometry = (_tuple(stride, space), padding, dilation, False, (0,) * space, groups)
    return _convolution(input, weight, bias, geometry)


@layer_rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> LayerCall:
    space = weight.dim() - 2
    stride, padding, dilation, output_padding = (_tuple(v, space) for v in (stride, padding, dilation, output_padding))
    return _convolution(input, weight, bias, (stride, padding, dilation, True, output_padding, groups))


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple) -> LayerCall:
    space = weight.dim() - 2
    stride, padding, dilation, transposed, _, groups = geometry

    def images(x: Tensor) -> Tensor:
        """[B, N, C, *space], with the N images that one record may have."""
        return x[:, None] if x.dim() == space + 2 else x

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.convolution(images(x).flatten(0, 1), weight, bias, *geometry)
        return y.unflatten(0, images(x).shape[:2]).reshape(*x.shape[: x.dim() - space - 1], *y.shape[1:])

    def weight_gradient(x: Tensor, g: Tensor) -> Tensor:
        shape = weight.detach().to(x.dtype)
        return torch.ops.aten.convolution_backward(g, x, shape, None, *geometry, (False, True, False))[1]

    def unfold(x: Tensor) -> Tensor:
        """[B, N, d, H, W] -> [B, T, k·d], with channels last.

        F.unfold would copy single entries, into a layout in which products are slow (measured: 2 to 20 times as long).
        """
        (h, w), (kernel_h, kernel_w) = padding, weight.shape[2:]
        padded = F.pad(x.flatten(0, 1).movedim(1, -1), (0, 0, w, w, h, h)).contiguous()
        windows = padded.unfold(1, dilation[0] * (kernel_h - 1) + 1, stride[0])[..., :: dilation[0]]
        windows = windows.unfold(2, dilation[1] * (kernel_w - 1) + 1, stride[1])[..., :: dilation[1]]
        return windows.movedim(3, -1).reshape(len(x), -1, weight[0].numel())

    def gradients(x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        x, g = images(x), images(g)
        of_bias = DenseGradient(g.sum((1, *range(3, g.dim()))))
        positions, p, d = g.shape[1] * math.prod(g.shape[3:]), len(weight), weight[0].numel()
        # Measured: a grouped convolution computes all records' gradients in about the time of their sum, unless the
        # weight is large compared to the number of positions; then Gram matrices are 2 to 8 times faster. Storing the
        # gradients for the weighted sum pays only if there are many positions to sum over a second time.
        gram = space == 2 and groups == 1 and not transposed and positions * (d + p) < d * p
        if gram or (positions < 64 and not worth_storing(weight.numel())):
            terms = math.prod(x.shape[1:2] + x.shape[3:]) if transposed else positions
            of_weight: LayerGradient = ConvolutionGradient(
                x, g, weight_gradient, unfold if gram else None, weight.shape, terms
            )
        else:
            of_weight = DenseGradient(torch.func.vmap(weight_gradient)(x, g))
        return {"weight": of_weight, "bias": of_bias}

    return LayerCall(input, {"weight": weight, "bias": bias}, forward, gradients)


def _flatten_positions(x: Tensor) -> Tensor:
    """[B, ..., d] -> [B, T, d]."""
    return x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])


def _sum_positions(g: Tensor) -> Tensor:
    """[B, T, ...] -> [B, ...]; indexing a single position is faster than its sum."""
    return g[:, 0] if g.shape[1] == 1 else g.sum(1)


def _without_padding(g: Tensor, index: Tensor, padding_idx: int | None, rows: int) -> Tensor:
    """Output gradients, zero where the index is the padding row's."""
    return g if padding_idx is None else torch.where((index == padding_idx % rows)[..., None], 0, g)


def _tuple(value: int | Sequence[int], length: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * length if len(values) == 1 else values
