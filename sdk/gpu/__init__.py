"""`python -m sdk gpu`: what can be known of CUDA paths only on a GPU, step by step, in ten minutes."""
