"""Files that are written as a whole, and read only if they are what they claim to be."""

from hardconcrete.files.paths import as_path
from hardconcrete.files.replace import append_text, read_text, replace_file
from hardconcrete.files.tensors import TensorFile

__all__ = ["TensorFile", "append_text", "as_path", "read_text", "replace_file"]
