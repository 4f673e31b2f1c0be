"""The experiments of the paper, on the public names of the library only."""
