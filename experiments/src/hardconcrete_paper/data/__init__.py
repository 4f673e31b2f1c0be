"""The data sets: CIFAR, Tiny Shakespeare, and what is done to images."""
