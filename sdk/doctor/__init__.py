"""`python -m sdk doctor`: what of this machine would spoil a run, and what to do about it."""
