"""Settings of the whole test run; nothing here reaches the network."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import torch


torch.set_num_threads(1)  # tiny models: more threads only add noise and overhead
