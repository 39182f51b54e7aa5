"""minirouter: Router-R1 (arXiv 2506.09033) from scratch, on one GPU."""

import logging

__version__ = "0.1.0"

# On some CPUs bitsandbytes warns that a kernel could not be fetched; load.py keeps off that path anyway.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
