"""SST-2 with a sentence encoder: data, model, training, and other ways to prune."""
