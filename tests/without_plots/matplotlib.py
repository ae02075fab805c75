"""Stands before matplotlib on PYTHONPATH: a run of tests then ends without loss.png, which takes as
long as a small training."""

raise ImportError("a run of the tests draws nothing")
