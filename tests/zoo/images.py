"""Image models of timm and torchvision, with GroupNorm in place of BatchNorm but in the last two."""

from functools import partial

import timm
import torchvision.models as tv
from timm.layers import GatedMlp, GroupNormAct, StdConv2d
from timm.models import efficientnet, metaformer, mlp_mixer, resnet, resnetv2
from timm.models._efficientnet_builder import decode_arch_def
from torch import nn

from zoo import CLASSES, Model, classes, cross_entropy, images


def groups(channels: int, **_) -> nn.GroupNorm:
    return nn.GroupNorm(1, channels)


def of_timm(make, rates=("drop_rate", "drop_path_rate"), **options):
    """make: a class or model name of timm; rates: its arguments that are dropout rates."""
    maker = partial(timm.create_model, make) if isinstance(make, str) else make

    def build(dropout: bool) -> nn.Module:
        return maker(num_classes=CLASSES, **options, **dict.fromkeys(rates, 0.1 * dropout))

    return build


def efficient(**options):
    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k3_s2_e4_c16_se0.25"]])
    return efficientnet.EfficientNet(blocks, stem_size=8, num_features=32, **options)


def of_torchvision(make, dropping: bool = False, **options):
    """dropping: whether `make` takes a dropout rate."""

    def build(dropout: bool) -> nn.Module:
        return make(num_classes=CLASSES, **options, **({"dropout": 0.1 * dropout} if dropping else {}))

    return build


def vgg(**options):
    made = tv.VGG(tv.vgg.make_layers([8, "M", 16, "M"]), init_weights=False, **options)
    made.avgpool = nn.AdaptiveAvgPool2d(2)
    made.classifier[0], made.classifier[3], made.classifier[6] = (
        nn.Linear(64, 32),
        nn.Linear(32, 32),
        nn.Linear(32, CLASSES),
    )
    return made


def pictures(side: int = 32):
    return lambda: (images(side), classes())


def seen(build, side: int = 32) -> Model:
    return Model(build, pictures(side), cross_entropy)


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TILES = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "mlp_ratio": 2}
MODELS = {
    "timm ViT": seen(of_timm("vit_tiny_patch16_224", **SMALL)),
    "timm ViT, registers and mean": seen(of_timm("vit_tiny_patch16_224", **SMALL, reg_tokens=2, global_pool="avg")),
    "timm ViT, normalized queries": seen(of_timm("vit_tiny_patch16_224", **SMALL, qk_norm=True, init_values=0.1)),
    "timm DeiT, distilled": seen(of_timm("deit_tiny_distilled_patch16_224", **SMALL)),
    "timm BEiT": seen(of_timm("beit_base_patch16_224", **SMALL)),
    "timm EVA-02": seen(of_timm("eva02_tiny_patch14_224", **SMALL)),
    "timm CaiT": seen(of_timm("cait_xxs24_224", **SMALL)),
    "timm Swin": seen(
        of_timm(
            "swin_tiny_patch4_window7_224", img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(1, 1),
            num_heads=(2, 2),
        )
    ),
    "timm PoolFormer": seen(
        of_timm(metaformer.MetaFormer, depths=(1, 1), dims=(16, 24), token_mixers=metaformer.Pooling)
    ),
    "timm ConvNeXt": seen(of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 24))),
    "timm MLP-Mixer": seen(of_timm(mlp_mixer.MlpMixer, **{**TILES, "mlp_ratio": (0.5, 2.0)})),
    "timm ResMLP": seen(
        of_timm(mlp_mixer.MlpMixer, **TILES, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine)
    ),
    "timm gMLP": seen(
        of_timm(mlp_mixer.MlpMixer, **TILES, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=GatedMlp)
    ),
    "timm ResNet, GroupNorm": seen(
        of_timm(
            resnet.ResNet, block=resnet.BasicBlock, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=4,
            norm_layer=groups,
        )
    ),
    "timm ResNetV2, weight-standardized": seen(
        of_timm(
            resnetv2.ResNetV2, layers=(1, 1), channels=(32, 64), stem_chs=32, conv_layer=StdConv2d,
            norm_layer=partial(GroupNormAct, num_groups=4),
        )
    ),
    "timm NF-ResNet": seen(of_timm("nf_resnet26", width_factor=0.125)),
    "timm EfficientNet, GroupNorm": seen(of_timm(efficient, norm_layer=groups)),
    "torchvision ResNet, GroupNorm": seen(
        of_torchvision(tv.resnet.ResNet, block=tv.resnet.BasicBlock, layers=[1, 1, 1, 1], norm_layer=groups)
    ),
    "torchvision ResNeXt, GroupNorm": seen(
        of_torchvision(
            tv.resnet.ResNet, block=tv.resnet.Bottleneck, layers=[1, 1, 1, 1], groups=4, width_per_group=2,
            norm_layer=groups,
        )
    ),
    "torchvision MobileNetV2, GroupNorm": seen(of_torchvision(tv.MobileNetV2, True, width_mult=0.1, norm_layer=groups)),
    "torchvision VGG": seen(of_torchvision(vgg, True)),
    "torchvision SqueezeNet": seen(of_torchvision(tv.SqueezeNet, True, version="1_1")),
    "torchvision ViT": seen(
        of_torchvision(
            tv.VisionTransformer, True, image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32,
            mlp_dim=48,
        ),
        16,
    ),
    "torchvision Swin": seen(
        of_torchvision(
            tv.SwinTransformer, patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4],
            stochastic_depth_prob=0.0,
        )
    ),
    "torchvision ConvNeXt": seen(
        of_torchvision(
            tv.ConvNeXt, block_setting=[tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 1)]
        )
    ),
    "torchvision EfficientNet, GroupNorm": seen(
        of_torchvision(
            tv.EfficientNet,
            inverted_residual_setting=[
                tv.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1),
                tv.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 1),
            ],
            norm_layer=groups,
            dropout=0.0,
            last_channel=32,
        )
    ),
    "torchvision RegNet, GroupNorm": seen(
        of_torchvision(
            tv.RegNet,
            block_params=tv.regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4),
            stem_width=8,
            norm_layer=groups,
        )
    ),
    "timm ResNet": seen(of_timm(resnet.ResNet, block=resnet.BasicBlock, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16))),
    "torchvision ResNet": seen(of_torchvision(tv.resnet.ResNet, block=tv.resnet.BasicBlock, layers=[1, 1, 1, 1])),
}  # fmt: skip
