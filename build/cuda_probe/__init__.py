"""The cuda-probe: does code of this CUDA toolkit run on this host? ``python -m cuda_probe`` answers."""
