"""Table 1, figure 3 and the gallery: networks on MNIST."""
