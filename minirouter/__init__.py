"""minirouter: Router-R1 (arXiv 2506.09033) from scratch, on one GPU."""

__version__ = "0.1.0"
