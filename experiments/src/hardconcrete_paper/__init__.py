"""The experiments of the paper, made with the public names of hardconcrete."""
