"""Finding the fastest launch configurations on the machine at hand, for `configs/kernels/<arch>.json`."""
