"""Errors and warnings. A message says where, what is wrong, what is expected, and what to do."""

__all__ = [
    "ArgumentError",
    "CompactionError",
    "DataError",
    "GateError",
    "HardConcreteError",
    "HardConcreteWarning",
    "MissingExtraError",
    "SiteError",
    "TraceError",
]


class HardConcreteWarning(UserWarning):
    """All warnings of hardconcrete: the call runs, but probably not with the result you want.

    Example:
        >>> import torch, hardconcrete as hc, warnings
        >>> gated = hc.attach_gates(torch.nn.Linear(3, 2), torch.zeros(1, 3), sites=[":in"])
        >>> _ = torch.nn.init.constant_(gated.gates.log_alpha, -5.0)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", hc.HardConcreteWarning)
        ...     try:
        ...         _ = hc.check_gates(gated)
        ...     except hc.HardConcreteWarning as warning:
        ...         print(str(warning).partition(":")[0])
        the network has collapsed
    """


class HardConcreteError(Exception):
    """The base of every error that hardconcrete raises on purpose.

    Example:
        >>> import torch, hardconcrete as hc
        >>> try:
        ...     hc.HardConcrete(torch.zeros(3)).readout("mode")
        ... except hc.HardConcreteError as error:
        ...     print(error)
        readout 'mode' is not known to HardConcrete; use one of 'paper', 'median', 'mean', 'binary'
    """


class ArgumentError(HardConcreteError, ValueError):
    """An argument has an invalid value. It is a ``ValueError``, as in PyTorch.

    Example:
        >>> import torch, hardconcrete as hc
        >>> try:
        ...     hc.HardConcrete(torch.zeros(3), low=0.1)
        ... except ValueError as error:
        ...     print(error)
        the stretch (low, high) = (0.1, 1.1) must be finite, with low < 0 and high > 1
    """


class SiteError(HardConcreteError, ValueError):
    """A site for gates does not exist in the model, or cannot be gated.

    Example:
        >>> import torch, hardconcrete as hc
        >>> try:
        ...     hc.attach_gates(torch.nn.Linear(3, 2), torch.zeros(1, 3), sites=["fc:in"])
        ... except hc.HardConcreteError as error:
        ...     print(error)
        'fc:in': there is no module 'fc'
    """


class TraceError(HardConcreteError, RuntimeError):
    """The forward of a model cannot be traced into one graph of operators.

    Example:
        >>> import torch, hardconcrete as hc
        >>> class Chooses(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if x.sum() > 0 else x
        >>> try:
        ...     hc.find_groups(Chooses(3, 3), torch.zeros(2, 3))
        ... except hc.HardConcreteError as error:
        ...     print(str(error).partition(":")[0])
        Chooses cannot be traced by torch.export
    """


class CompactionError(HardConcreteError, RuntimeError):
    """A model cannot be compacted in the requested way.

    Example:
        >>> import torch, hardconcrete as hc
        >>> from hardconcrete.compaction.plan import Cut
        >>> plan = hc.CompactionPlan("Linear", {}, (Cut("weight", 0, 8, (1, 2)),))
        >>> try:
        ...     plan.apply(torch.nn.Linear(2, 3))
        ... except hc.HardConcreteError as error:
        ...     print(str(error).partition(":")[0])
        the plan is for another architecture
    """


class GateError(HardConcreteError, RuntimeError):
    """A gated model is used where its gates have no value, or two different ones.

    Example:
        >>> import torch, hardconcrete as hc
        >>> gated = hc.attach_gates(torch.nn.Linear(3, 2), torch.zeros(1, 3), sites=[":in"])
        >>> try:
        ...     gated.model(torch.zeros(1, 3))
        ... except hc.HardConcreteError as error:
        ...     print(str(error).partition(";")[0])
        gates have no value here: in training they are drawn for one call of the GatedModel
    """


class MissingExtraError(HardConcreteError, ImportError):
    """An optional package is not installed. The message names the extra that installs it.

    Example:
        >>> from hardconcrete.errors import MissingExtraError
        >>> print(MissingExtraError("matplotlib", extra="plot"))
        matplotlib is needed here and is not installed: pip install 'hardconcrete[plot]'
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is needed here and is not installed: pip install 'hardconcrete[{extra}]'"
        )


class DataError(HardConcreteError):
    """A data file is missing, corrupt or unreachable. The message says where to get it.

    Example:
        >>> from pathlib import Path
        >>> from hardconcrete.errors import DataError
        >>> from hardconcrete.demo.data import load_mnist
        >>> try:
        ...     load_mnist("train", Path("nowhere"))
        ... except DataError as error:
        ...     print(str(error).splitlines()[0])
        train-images-idx3-ubyte (or .gz) is not in nowhere (given as data), which is not a directory
    """
