"""The data of the demo, MNIST or small digits: found, fetched and verified."""

from hardconcrete.demo.data.download import DOWNLOAD_ERRORS, download, read_member
from hardconcrete.demo.data.files import (
    MAX_FILE_BYTES,
    DataFolder,
    FetchAttempt,
    Package,
    RemoteFile,
    Source,
    cache_folder,
    data_folder,
    fetch,
    file_names,
    not_found_error,
    obtain,
    read_verified,
    repair_advice,
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
    "DOWNLOAD_ERRORS",
    "MAX_FILE_BYTES",
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
    "file_names",
    "find_mnist",
    "load_digits",
    "load_mnist",
    "not_found_error",
    "obtain",
    "read_member",
    "read_verified",
    "repair_advice",
]
