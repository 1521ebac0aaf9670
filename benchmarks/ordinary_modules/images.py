"""Images: classifiers, autoencoders, generative models, distillation, contrastive learning."""

import copy
import math
from functools import partial
from itertools import pairwise

import pytorch_lightning as pl
import torch
from ordinary import N, case
from steps import Base, Rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset


class Images(Rows):
    def __init__(self, channels=1, side=28, classes=10):
        super().__init__(channels, side, side, classes=classes)


@case("MNIST of the hydra template", "ashleve/lightning-hydra-template")
def _():
    class SimpleDenseNet(nn.Module):
        def __init__(self, sizes=(784, 64, 128, 64, 10)):
            super().__init__()
            layers = []
            for a, b in pairwise(sizes[:-1]):
                layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
            self.model = nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))

        def forward(self, x):
            batch_size, _channels, _width, _height = x.size()
            return self.model(x.view(batch_size, -1))

    return mnist_module(SimpleDenseNet()), Images(), {}


def mnist_module(net):
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    class MnistLitModule(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters(logger=False, ignore=["net"])
            self.net = net
            self.criterion = nn.CrossEntropyLoss()
            self.train_acc = MulticlassAccuracy(num_classes=10)
            self.train_loss = MeanMetric()

        def forward(self, x):
            return self.net(x)

        def model_step(self, batch):
            x, y = batch
            logits = self.forward(x)
            loss = self.criterion(logits, y)
            return loss, torch.argmax(logits, dim=1), y

        def training_step(self, batch, batch_idx):
            loss, preds, targets = self.model_step(batch)
            self.train_loss(loss)
            self.train_acc(preds, targets)
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
            self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)
            return {"optimizer": optimizer}

    return MnistLitModule()


@case("autoencoder, basics", "Lightning-AI/pytorch-lightning examples/pytorch/basics/autoencoder.py")
def _():
    class LitAutoEncoder(pl.LightningModule):
        def __init__(self, hidden_dim=64, learning_rate=10e-3):
            super().__init__()
            self.save_hyperparameters()
            self.encoder = nn.Sequential(nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
            self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28))

        def training_step(self, batch, batch_idx):
            return self._common_step(batch, batch_idx, "train")

        def _prepare_batch(self, batch):
            x, _ = batch
            return x.view(x.size(0), -1)

        def _common_step(self, batch, batch_idx, stage):
            x = self._prepare_batch(batch)
            loss = F.mse_loss(x, self.decoder(self.encoder(x)))
            self.log(f"{stage}_loss", loss, on_step=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    return LitAutoEncoder(), Images(), {}


@case(
    "backbone classifier", "Lightning-AI/pytorch-lightning examples/pytorch/basics/backbone_image_classifier.py"
)  # fmt: skip
def _():
    class Backbone(nn.Module):
        def __init__(self, hidden_dim=128):
            super().__init__()
            self.l1 = nn.Linear(28 * 28, hidden_dim)
            self.l2 = nn.Linear(hidden_dim, 10)

        def forward(self, x):
            x = x.view(x.size(0), -1)
            x = torch.relu(self.l1(x))
            return torch.relu(self.l2(x))

    class LitClassifier(Base):
        def __init__(self, backbone):
            super().__init__()
            self.save_hyperparameters(ignore=["backbone"])
            self.backbone = backbone

        def forward(self, x):
            return self.backbone(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

    return LitClassifier(Backbone()), Images(), {}


@case("deep autoencoder, CIFAR-10", "Lightning-AI/tutorials course_UvA-DL/08-deep-autoencoders")
def _():
    class Encoder(nn.Module):
        def __init__(self, channels, c, latent, act=nn.GELU):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(channels, c, 3, padding=1, stride=2), act(),
                nn.Conv2d(c, c, 3, padding=1), act(),
                nn.Conv2d(c, 2 * c, 3, padding=1, stride=2), act(),
                nn.Conv2d(2 * c, 2 * c, 3, padding=1), act(),
                nn.Conv2d(2 * c, 2 * c, 3, padding=1, stride=2), act(),
                nn.Flatten(), nn.Linear(2 * 16 * c, latent),
            )  # fmt: skip

        def forward(self, x):
            return self.net(x)

    class Decoder(nn.Module):
        def __init__(self, channels, c, latent, act=nn.GELU):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(latent, 2 * 16 * c), act())
            self.net = nn.Sequential(
                nn.ConvTranspose2d(2 * c, 2 * c, 3, output_padding=1, padding=1, stride=2), act(),
                nn.Conv2d(2 * c, 2 * c, 3, padding=1), act(),
                nn.ConvTranspose2d(2 * c, c, 3, output_padding=1, padding=1, stride=2), act(),
                nn.Conv2d(c, c, 3, padding=1), act(),
                nn.ConvTranspose2d(c, channels, 3, output_padding=1, padding=1, stride=2), nn.Tanh(),
            )  # fmt: skip

        def forward(self, x):
            x = self.linear(x)
            return self.net(x.reshape(x.shape[0], -1, 4, 4))

    class Autoencoder(pl.LightningModule):
        def __init__(self, base_channel_size=8, latent_dim=32, width=32, height=32):
            super().__init__()
            self.save_hyperparameters()
            self.encoder = Encoder(3, base_channel_size, latent_dim)
            self.decoder = Decoder(3, base_channel_size, latent_dim)
            self.example_input_array = torch.zeros(2, 3, width, height)

        def forward(self, x):
            return self.decoder(self.encoder(x))

        def _get_reconstruction_loss(self, batch):
            x, _ = batch
            loss = F.mse_loss(x, self.forward(x), reduction="none")
            return loss.sum(dim=[1, 2, 3]).mean(dim=[0])

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.2, patience=20)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

        def training_step(self, batch, batch_idx):
            loss = self._get_reconstruction_loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self._get_reconstruction_loss(batch))

        def val_dataloader(self):
            return DataLoader(Subset(Images(3, 32), range(64)), 32)

    return Autoencoder(), Images(3, 32), {}


@case("normalizing flow", "Lightning-AI/tutorials course_UvA-DL/09-normalizing-flows")
def _():
    class Dequantization(nn.Module):
        def __init__(self, alpha=1e-5, quants=256):
            super().__init__()
            self.alpha, self.quants = alpha, quants

        def forward(self, z, ldj):
            z = z.to(torch.float32)
            z = (z + torch.rand_like(z).detach()) / self.quants
            ldj -= math.log(self.quants) * z[0].numel()
            z = z * (1 - self.alpha) + 0.5 * self.alpha
            ldj += math.log(1 - self.alpha) * z[0].numel()
            ldj += (-torch.log(z) - torch.log(1 - z)).sum(dim=[1, 2, 3])
            return torch.log(z) - torch.log(1 - z), ldj

    class CouplingLayer(nn.Module):
        def __init__(self, network, mask, c_in):
            super().__init__()
            self.network = network
            self.scaling_factor = nn.Parameter(torch.zeros(c_in))
            self.register_buffer("mask", mask)

        def forward(self, z, ldj):
            z_in = z * self.mask
            s, t = self.network(z_in).chunk(2, dim=1)
            s_fac = self.scaling_factor.exp().view(1, -1, 1, 1)
            s = torch.tanh(s / s_fac) * s_fac
            s, t = s * (1 - self.mask), t * (1 - self.mask)
            z = (z + t) * torch.exp(s)
            ldj += s.sum(dim=[1, 2, 3])
            return z, ldj

    def checkerboard(side, invert):
        h, w = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        mask = torch.fmod(h + w, 2).float().view(1, 1, side, side)
        return 1 - mask if invert else mask

    class LayerNormChannels(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.gamma, self.beta = nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

        def forward(self, x):
            mean = x.mean(dim=1, keepdim=True)
            var = x.var(dim=1, unbiased=False, keepdim=True)
            return (x - mean) / torch.sqrt(var + 1e-5) * self.gamma + self.beta

    class GatedConv(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.net = nn.Sequential(nn.ELU(), nn.Conv2d(c, c, 3, padding=1), nn.ELU(), nn.Conv2d(c, 2 * c, 1))

        def forward(self, x):
            val, gate = self.net(x).chunk(2, dim=1)
            return x + val * torch.sigmoid(gate)

    def gated_net(c=8):
        last = nn.Conv2d(c, 2, 3, padding=1)
        nn.init.zeros_(last.weight)
        return nn.Sequential(nn.Conv2d(1, c, 3, padding=1), GatedConv(c), LayerNormChannels(c), nn.ELU(), last)

    class ImageFlow(pl.LightningModule):
        def __init__(self):
            super().__init__()
            couplings = [CouplingLayer(gated_net(), checkerboard(14, k % 2 == 1), 1) for k in range(3)]
            self.flows = nn.ModuleList([Dequantization(), *couplings])
            self.prior = torch.distributions.normal.Normal(loc=0.0, scale=1.0)

        def encode(self, imgs):
            z, ldj = imgs, torch.zeros(imgs.shape[0], device=self.device)
            for flow in self.flows:
                z, ldj = flow(z, ldj)
            return z, ldj

        def _get_likelihood(self, imgs):
            z, ldj = self.encode(imgs)
            log_px = ldj + self.prior.log_prob(z).sum(dim=[1, 2, 3])
            bpd = -log_px * math.log2(math.exp(1)) / math.prod(imgs.shape[1:])
            return bpd.mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)]

        def training_step(self, batch, batch_idx):
            loss = self._get_likelihood(batch[0])
            self.log("train_bpd", loss)
            return loss

    data = Images(1, 14)
    data.x = (data.x * 255).to(torch.uint8)
    return ImageFlow(), data, {}


class AttentionBlock(nn.Module):
    def __init__(self, dim, hidden, heads, dropout=0.0):
        super().__init__()
        self.layer_norm_1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads)
        self.layer_norm_2 = nn.LayerNorm(dim)
        self.linear = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
        )

    def forward(self, x):
        inp_x = self.layer_norm_1(x)
        x = x + self.attn(inp_x, inp_x, inp_x)[0]
        return x + self.linear(self.layer_norm_2(x))


def img_to_patch(x, patch_size):
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // patch_size, patch_size, w // patch_size, patch_size)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2, 4)


class VisionTransformer(nn.Module):
    def __init__(self, dim=48, hidden=96, channels=3, heads=4, layers=2, classes=10, patch=8, patches=16, dropout=0.1):
        super().__init__()
        self.patch_size = patch
        self.input_layer = nn.Linear(channels * patch**2, dim)
        self.transformer = nn.Sequential(*(AttentionBlock(dim, hidden, heads, dropout) for _ in range(layers)))
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        self.dropout = nn.Dropout(dropout)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, 1 + patches, dim))

    def forward(self, x):
        x = self.input_layer(img_to_patch(x, self.patch_size))
        b, t, _ = x.shape
        x = torch.cat([self.cls_token.repeat(b, 1, 1), x], dim=1) + self.pos_embedding[:, : t + 1]
        x = self.transformer(self.dropout(x).transpose(0, 1))
        return self.mlp_head(x[0])


@case("Vision Transformer", "Lightning-AI/tutorials course_UvA-DL/11-vision-transformer")
def _():
    class ViT(pl.LightningModule):
        def __init__(self, lr=3e-4):
            super().__init__()
            self.save_hyperparameters()
            self.model = VisionTransformer()

        def forward(self, x):
            return self.model(x)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[100, 150], gamma=0.1)]

        def training_step(self, batch, batch_idx):
            imgs, labels = batch
            preds = self.model(imgs)
            loss = F.cross_entropy(preds, labels)
            acc = (preds.argmax(dim=-1) == labels).float().mean()
            self.log("train_loss", loss)
            self.log("train_acc", acc)
            return loss

    return ViT(), Images(3, 32), {}


@case("SimCLR", "Lightning-AI/tutorials course_UvA-DL/13-contrastive-learning")
def _():
    class Views(Images):
        def __getitem__(self, i):
            return [self.x[i], self.x[i].flip(-1) + 0.05 * torch.randn(self.x[i].shape)], self.y[i]

    class SimCLR(pl.LightningModule):
        def __init__(self, hidden_dim=32, temperature=0.07):
            super().__init__()
            self.save_hyperparameters()
            self.convnet = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                nn.Linear(32, 4 * hidden_dim), nn.ReLU(inplace=True), nn.Linear(4 * hidden_dim, hidden_dim),
            )  # fmt: skip

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)]

        def training_step(self, batch, batch_idx):
            imgs, _ = batch
            feats = self.convnet(torch.cat(imgs, dim=0))
            cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
            self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
            cos_sim.masked_fill_(self_mask, -9e15)
            pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
            cos_sim = cos_sim / self.hparams.temperature
            nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
            self.log("train_loss", nll)
            return nll

    return SimCLR(), Views(), {}


@case("logistic regression", "Lightning-Universe/lightning-bolts")
def _():
    class LogisticRegression(Base):
        def __init__(self, input_dim=784, num_classes=10, l1_strength=0.001, l2_strength=0.001):
            super().__init__()
            self.save_hyperparameters()
            self.linear = nn.Linear(input_dim, num_classes)

        def forward(self, x):
            return F.softmax(self.linear(x), dim=1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            x = x.view(x.size(0), -1)
            y_hat = self.linear(x)
            loss = F.cross_entropy(y_hat, y, reduction="sum")
            loss += self.hparams.l1_strength * self.linear.weight.abs().sum()
            loss += self.hparams.l2_strength * self.linear.weight.pow(2).sum()
            loss /= x.size(0)
            self.log("train_ce_loss", loss)
            return {"loss": loss}

    return LogisticRegression(), Images(), {}


@case("GAN, two optimizers", "Lightning-AI/tutorials lightning_examples/basic-gan")
def _():
    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64, 0.8), nn.ReLU(), nn.Linear(64, 784))
            self.discriminator = nn.Sequential(nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid())

        def adversarial_loss(self, y_hat, y):
            return F.binary_cross_entropy(y_hat, y)

        def training_step(self, batch):
            imgs, _ = batch
            imgs = imgs.flatten(1)
            optimizer_g, optimizer_d = self.optimizers()
            z = torch.randn(imgs.shape[0], 16)
            z = z.type_as(imgs)
            self.toggle_optimizer(optimizer_g)
            valid = torch.ones(imgs.size(0), 1)
            g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), valid.type_as(imgs))
            self.manual_backward(g_loss)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)
            self.toggle_optimizer(optimizer_d)
            real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
            fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), torch.zeros_like(valid))
            d_loss = (real_loss + fake_loss) / 2
            self.manual_backward(d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self):
            opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
            opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
            return [opt_g, opt_d], []

    return Gan(), Images(), {}


@case("MNIST convnet", "pytorch/examples mnist")
def _():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, 1)
            self.conv2 = nn.Conv2d(8, 16, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1 = nn.Linear(2304, 32)
            self.fc2 = nn.Linear(32, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = self.dropout1(F.max_pool2d(x, 2))
            x = F.relu(self.fc1(torch.flatten(x, 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            data, target = batch
            return F.nll_loss(self.net(data), target)

        def configure_optimizers(self):
            optimizer = torch.optim.Adadelta(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]

    return Module(), Images(), {}


@case("VAE, MNIST", "pytorch/examples vae")
def _():
    class Vae(Base):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(784, 400)
            self.fc21, self.fc22 = nn.Linear(400, 20), nn.Linear(400, 20)
            self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def training_step(self, batch, batch_idx):
            x = batch[0].view(-1, 784)
            mu, logvar = self.encode(x)
            recon = self.decode(self.reparameterize(mu, logvar))
            bce = F.binary_cross_entropy(recon, x, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            return bce + kld

    return Vae(), Images(), {}


@case("super resolution", "pytorch/examples super_resolution")
def _():
    class Net(nn.Module):
        def __init__(self, upscale_factor=2):
            super().__init__()
            self.relu = nn.ReLU()
            self.conv1 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2))
            self.conv2 = nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
            self.conv3 = nn.Conv2d(16, 8, (3, 3), (1, 1), (1, 1))
            self.conv4 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
            self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
            for conv in (self.conv1, self.conv2, self.conv3):
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

        def forward(self, x):
            x = self.relu(self.conv1(x))
            x = self.relu(self.conv2(x))
            x = self.relu(self.conv3(x))
            return self.pixel_shuffle(self.conv4(x))

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = Net(), nn.MSELoss()

        def training_step(self, batch, batch_idx):
            target = batch[0]
            return self.criterion(self.model(F.avg_pool2d(target, 2)), target)

    return Module(), Images(), {}


@case("Siamese network", "pytorch/examples siamese_network")
def _():
    class Pairs(Images):
        def __getitem__(self, i):
            j = (i * 7 + 3) % N
            return self.x[i], self.x[j], (self.y[i] == self.y[j]).float()

    class SiameseNetwork(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
            self.fc = nn.Sequential(nn.Linear(576, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
            self.sigmoid = nn.Sigmoid()
            self.criterion = nn.BCELoss()
            self.apply(self.init_weights)

        def init_weights(self, m):
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                m.bias.data.fill_(0.01)

        def forward_once(self, x):
            output = self.backbone(x)
            return output.view(output.size()[0], -1)

        def training_step(self, batch, batch_idx):
            images_1, images_2, targets = batch
            output = torch.cat((self.forward_once(images_1), self.forward_once(images_2)), 1)
            outputs = self.sigmoid(self.fc(output)).squeeze()
            return self.criterion(outputs, targets)

        def configure_optimizers(self):
            return torch.optim.Adadelta(self.parameters(), lr=1.0)

    return SiameseNetwork(), Pairs(), {}


@case("U-Net, Dice and cross entropy", "milesial/Pytorch-UNet")
def _():
    class DoubleConv(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.double_conv = nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip

        def forward(self, x):
            return self.double_conv(x)

    class Up(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.up = nn.ConvTranspose2d(a, a // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(a, b)

        def forward(self, x1, x2):
            x1 = self.up(x1)
            dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
            x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            return self.conv(torch.cat([x2, x1], dim=1))

    class UNet(nn.Module):
        def __init__(self, n_channels=3, n_classes=2):
            super().__init__()
            self.inc = DoubleConv(n_channels, 8)
            self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
            self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(16, 32))
            self.up1, self.up2 = Up(32, 16), Up(16, 8)
            self.outc = nn.Conv2d(8, n_classes, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.down1(x1)
            x3 = self.down2(x2)
            return self.outc(self.up2(self.up1(x3, x2), x1))

    def dice_coeff(a, b, reduce_batch_first=False, epsilon=1e-6):
        sum_dim = (-1, -2, -3) if reduce_batch_first else (-1, -2)
        inter = 2 * (a * b).sum(dim=sum_dim)
        sets_sum = a.sum(dim=sum_dim) + b.sum(dim=sum_dim)
        sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
        return ((inter + epsilon) / (sets_sum + epsilon)).mean()

    def dice_loss(a, b):
        return 1 - dice_coeff(a.flatten(0, 1), b.flatten(0, 1), reduce_batch_first=True)

    class Masks(Images):
        def __getitem__(self, i):
            return {"image": self.x[i], "mask": (self.x[i].mean(0) > 0.5).long()}

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = UNet(), nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            images, true_masks = batch["image"], batch["mask"]
            masks_pred = self.model(images)
            loss = self.criterion(masks_pred, true_masks)
            one_hot = F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float()
            loss += dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot)
            return loss

        def configure_optimizers(self):
            return torch.optim.RMSprop(self.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)

    return Module(), Masks(3, 24), {}


@case("ResNet, CIFAR-10", "kuangliu/pytorch-cifar")
def _():
    class BasicBlock(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
            self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
            self.shortcut = nn.Sequential()
            if stride != 1 or a != b:
                self.shortcut = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.shortcut(x)
            return F.relu(out)

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
            self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), BasicBlock(16, 32, 2))
            self.linear = nn.Linear(32, 10)

        def forward(self, x):
            out = self.layers(F.relu(self.bn1(self.conv1(x))))
            out = F.avg_pool2d(out, 8)
            return self.linear(out.view(out.size(0), -1))

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = ResNet()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)]

    return Module(), Images(3, 32), {}


@case("masked autoencoder", "lucidrains/vit-pytorch mae.py")
def _():
    class Mae(Base):
        def __init__(self, dim=48, patch=8, masking_ratio=0.75):
            super().__init__()
            self.masking_ratio, self.patch = masking_ratio, patch
            self.patch_to_emb = nn.Sequential(nn.LayerNorm(3 * patch**2), nn.Linear(3 * patch**2, dim))
            self.pos_embedding = nn.Parameter(torch.randn(1, 16, dim))
            block = partial(nn.TransformerEncoderLayer, dim, 4, 96, 0.0, F.gelu, batch_first=True, norm_first=True)
            self.encoder, self.decoder = block(), block()
            self.mask_token = nn.Parameter(torch.randn(dim))
            self.decoder_pos_emb = nn.Embedding(16, dim)
            self.to_pixels = nn.Linear(dim, 3 * patch**2)

        def training_step(self, batch, batch_idx):
            patches = img_to_patch(batch[0], self.patch)
            b, num_patches, _ = patches.shape
            tokens = self.patch_to_emb(patches) + self.pos_embedding
            num_masked = int(self.masking_ratio * num_patches)
            rand_indices = torch.rand(b, num_patches, device=self.device).argsort(dim=-1)
            masked, unmasked = rand_indices[:, :num_masked], rand_indices[:, num_masked:]
            batch_range = torch.arange(b, device=self.device)[:, None]
            tokens = self.encoder(tokens[batch_range, unmasked])
            masked_patches = patches[batch_range, masked]
            decoder_tokens = torch.zeros(b, num_patches, tokens.shape[-1], device=self.device)
            decoder_tokens[batch_range, unmasked] = tokens + self.decoder_pos_emb(unmasked)
            mask_tokens = self.mask_token.expand(b, num_masked, -1) + self.decoder_pos_emb(masked)
            decoder_tokens[batch_range, masked] = mask_tokens
            pred = self.to_pixels(self.decoder(decoder_tokens)[batch_range, masked])
            return F.mse_loss(pred, masked_patches)

    return Mae(), Images(3, 32), {}


@case("diffusion, DDPM", "lucidrains/denoising-diffusion-pytorch")
def _():
    class SinusoidalPosEmb(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, x):
            half_dim = self.dim // 2
            emb = torch.exp(torch.arange(half_dim, device=x.device) * -(math.log(10000) / (half_dim - 1)))
            emb = x[:, None] * emb[None, :]
            return torch.cat((emb.sin(), emb.cos()), dim=-1)

    class Block(nn.Module):
        def __init__(self, a, b, emb):
            super().__init__()
            self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * b))
            self.proj, self.norm = nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b)
            self.res = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x, t):
            scale, shift = self.mlp(t)[:, :, None, None].chunk(2, dim=1)
            return F.silu(self.norm(self.proj(x)) * (scale + 1) + shift) + self.res(x)

    class Unet(nn.Module):
        def __init__(self, c=8):
            super().__init__()
            self.time_mlp = nn.Sequential(SinusoidalPosEmb(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, 4 * c))
            self.first, self.down = Block(1, c, 4 * c), nn.Conv2d(c, 2 * c, 4, 2, 1)
            self.mid = Block(2 * c, 2 * c, 4 * c)
            self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(2 * c, c, 3, padding=1))
            self.last, self.out = Block(2 * c, c, 4 * c), nn.Conv2d(c, 1, 1)

        def forward(self, x, t):
            t = self.time_mlp(t)
            h = self.first(x, t)
            x = self.up(self.mid(self.down(h), t))
            return self.out(self.last(torch.cat((x, h), dim=1), t))

    def extract(a, t, shape):
        out = a.gather(-1, t)
        return out.reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    class GaussianDiffusion(Base):
        def __init__(self, timesteps=100):
            super().__init__()
            self.model, self.num_timesteps = Unet(), timesteps
            alphas_cumprod = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, timesteps), dim=0)
            self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
            self.register_buffer("sqrt_one_minus_alphas_cumprod", (1.0 - alphas_cumprod).sqrt())
            self.register_buffer("loss_weight", torch.ones(timesteps))

        def q_sample(self, x_start, t, noise):
            a = extract(self.sqrt_alphas_cumprod, t, x_start.shape)
            return a * x_start + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise

        def training_step(self, batch, batch_idx):
            img = batch[0]
            b, _c, _h, _w = img.shape
            t = torch.randint(0, self.num_timesteps, (b,), device=self.device).long()
            img = img * 2 - 1
            noise = torch.randn_like(img)
            loss = F.mse_loss(self.model(self.q_sample(img, t, noise), t), noise, reduction="none")
            loss = loss.flatten(1).mean(dim=1)
            loss = loss * extract(self.loss_weight, t, loss.shape)
            return loss.mean()

    return GaussianDiffusion(), Images(1, 16), {}


@case("DeiT, distilled", "facebookresearch/deit")
def _():
    class DistillationLoss(nn.Module):
        def __init__(self, base_criterion, teacher_model, alpha=0.5, tau=1.0):
            super().__init__()
            self.base_criterion, self.teacher_model, self.alpha, self.tau = base_criterion, teacher_model, alpha, tau

        def forward(self, inputs, outputs, labels):
            base_loss = self.base_criterion(outputs, labels)
            with torch.no_grad():
                teacher_outputs = self.teacher_model(inputs)
            soft = F.log_softmax(outputs / self.tau, dim=1), F.log_softmax(teacher_outputs / self.tau, dim=1)
            loss = F.kl_div(*soft, reduction="sum", log_target=True) * (self.tau * self.tau) / outputs.numel()
            return base_loss * (1 - self.alpha) + loss * self.alpha

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = VisionTransformer()
            teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.criterion = DistillationLoss(nn.CrossEntropyLoss(label_smoothing=0.1), teacher)

        def training_step(self, batch, batch_idx):
            samples, targets = batch
            return self.criterion(samples, self.model(samples), targets)

        def configure_optimizers(self):
            decay = [p for p in self.model.parameters() if p.dim() > 1]
            rest = [p for p in self.model.parameters() if p.dim() <= 1]
            return torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=5e-4)

    return Module(), Images(3, 32), {}
