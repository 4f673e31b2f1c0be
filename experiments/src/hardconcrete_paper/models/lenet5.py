"""LeNet-5, and dropout where the paper has gates."""

from collections.abc import Mapping

from torch import Tensor, nn

from hardconcrete.demo import initialise


class LeNet5(nn.Module):
    """LeNet-5 as in Caffe's examples, 20-50-800-500 (section 4.1).

    Example:
        >>> import torch
        >>> LeNet5()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of 28 x 28 images."""
        x = self.pool(self.conv1(x).relu())
        x = self.pool(self.conv2(x).relu())
        return self.fc2(self.fc1(x.flatten(1)).relu())  # type: ignore[no-any-return]


def with_dropout(model: nn.Module, rates: Mapping[str, float]) -> nn.Module:
    """Dropout before or after layers, by their inputs or outputs: ``{"fc1:in": 0.5}``.

    Example:
        >>> from hardconcrete.demo import MLP
        >>> with_dropout(MLP(4, (3, 2)), {"fc2:in": 0.5}).fc2[0]
        Dropout(p=0.5, inplace=False)
    """
    for site, rate in rates.items():
        name, _, side = site.partition(":")
        layer = getattr(model, name)
        kind = nn.Dropout2d if isinstance(layer, nn.Conv2d) else nn.Dropout
        parts = (kind(rate), layer) if side == "in" else (layer, kind(rate))
        setattr(model, name, nn.Sequential(*parts))
    return model
