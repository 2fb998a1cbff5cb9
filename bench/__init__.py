"""Load generator, sweeps and comparisons."""
