"""Faults to plant, by language, for tests/mutants.py: lists of C and CUDA, a sample of Python."""
