"""A model as a graph of operators, with labels for the indices that are removed together."""
