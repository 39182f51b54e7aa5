"""What holds for every test: no network, one thread a process."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
