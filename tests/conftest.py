"""Settings of the whole test run; nothing here reaches the network."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ["COLUMNS"] = "400"  # the paths of temporary folders are long, and messages are not to be broken by them

import torch


torch.set_num_threads(1)  # tiny models: more threads only add noise and overhead
