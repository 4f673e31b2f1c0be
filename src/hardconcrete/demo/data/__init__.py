"""The data of the demo, MNIST or small digits: found, fetched and verified."""

from hardconcrete.demo.data.download import FAILURES, download, take
from hardconcrete.demo.data.files import (
    DataFolder,
    FetchAttempt,
    Package,
    RemoteFile,
    Source,
    cache_folder,
    data_folder,
    fetch,
    in_words,
    not_found,
    obtain,
    read,
    repair,
)
from hardconcrete.demo.data.images import (
    Images,
    Split,
    check_split,
    find_mnist,
    load_digits,
    load_mnist,
)

__all__ = [
    "FAILURES",
    "DataFolder",
    "FetchAttempt",
    "Images",
    "Package",
    "RemoteFile",
    "Source",
    "Split",
    "cache_folder",
    "check_split",
    "data_folder",
    "download",
    "fetch",
    "find_mnist",
    "in_words",
    "load_digits",
    "load_mnist",
    "not_found",
    "obtain",
    "read",
    "repair",
    "take",
]
