"""The networks of the experiments, as plain modules without gates.

The MLP of table 1 is that of the demo, ``hardconcrete.demo.MLP``.
"""

from hardconcrete_paper.models.lenet5 import LeNet5, with_dropout
from hardconcrete_paper.models.resnet import PreActResNet, ResNet, WideResNet
from hardconcrete_paper.models.transformer import CharTransformer

__all__ = [
    "CharTransformer",
    "LeNet5",
    "PreActResNet",
    "ResNet",
    "WideResNet",
    "with_dropout",
]
