"""Supervised learning with the same loop: classify the points of two rings, with early stopping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rein
from rein.ops.classification import accuracy
from rein.training.supervised import evaluator, trainer, validate


def rings(count):
    """Return noisy points of two rings, (count, 2), and the ring of each point."""
    ring = torch.randint(2, (count,))
    angle, radius = 2 * torch.pi * torch.rand(count), 1.0 + ring + 0.3 * torch.randn(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring)


torch.manual_seed(0)
data = DataLoader(rings(1_000), batch_size=50, shuffle=True)
held_out, test = DataLoader(rings(500), batch_size=500), DataLoader(rings(500), batch_size=500)
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

loop = trainer(model, nn.functional.cross_entropy, optimizer, epochs=100)
validate(loop, model, held_out, {"loss": nn.functional.cross_entropy, "accuracy": accuracy})
rein.handlers.reduce_learning_rate(loop, optimizer, "validation_loss", mode="min", factor=0.3, patience=2)
rein.early_stop(loop, "validation_loss", mode="min", patience=8)
rein.log(loop, every=5)

state = loop.run(data)
print(state.status, "-", state.reason)
print(evaluator(model, {"accuracy": accuracy})(test))
