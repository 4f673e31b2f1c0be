"""Training for all data sets: the driver of a run, the engine, and what a run leaves."""
