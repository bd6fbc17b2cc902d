"""The kit's own tests: faults that are put into sound backends, each of which a suite must find. See mutants."""
