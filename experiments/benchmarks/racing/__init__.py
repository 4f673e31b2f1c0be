"""The parts of the race: data, networks, training, methods, jobs, latency, tables."""
