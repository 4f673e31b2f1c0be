"""The networks of the experiments, as plain modules: nothing in them knows of gates."""

from hardconcrete.paper.models.mnist import MLP, LeNet5, with_dropout
from hardconcrete.paper.models.resnet import PreActResNet, ResNet, WideResNet
from hardconcrete.paper.models.transformer import CharTransformer

__all__ = [
    "MLP",
    "CharTransformer",
    "LeNet5",
    "PreActResNet",
    "ResNet",
    "WideResNet",
    "with_dropout",
]
