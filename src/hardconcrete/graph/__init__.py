"""A model as a graph of operators, with labels for what lives or dies as one."""
