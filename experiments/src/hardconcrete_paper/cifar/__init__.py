"""Table 2 and figure 4: residual networks on CIFAR."""
