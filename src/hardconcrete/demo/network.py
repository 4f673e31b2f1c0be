"""The network of the demo, which is the MLP of the paper's table 1."""

from torch import Tensor, nn


class MLP(nn.Module):
    """Two hidden layers, 784-300-100 for MNIST (section 4.1).

    Example:
        >>> import torch
        >>> MLP()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, inputs: int = 784, hidden: tuple[int, int] = (300, 100)) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], 10)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images, flattened here."""
        x = self.fc1(x.flatten(1)).relu()
        return self.fc3(self.fc2(x).relu())  # type: ignore[no-any-return]


def initialise(model: nn.Module) -> None:
    """He-normal weights, by the number of inputs, and zero biases, as in the paper's code."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
