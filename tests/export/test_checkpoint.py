"""Shared code of the exporters: errors name a path that cannot be written, and no partial file remains.

Referee: /dev/full, the kernel's device on which every write fails because it is full.
"""

from pathlib import Path

import pytest
import torch

from hrm_hf.export.checkpoint import complete_folder_or_nothing, complete_or_nothing
from hrm_hf.hub.kinds import load_config


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("write", [lambda file: file.write_bytes(b"x"), lambda file: torch.save(torch.ones(9), file)])
def test_a_full_disk_leaves_nothing(write, tmp_path):
    out = tmp_path / "model.pt2"
    with pytest.raises((OSError, RuntimeError)):
        with complete_or_nothing(out, force=False) as unfinished:
            unfinished.symlink_to(FULL)
            write(unfinished)
    with pytest.raises((OSError, RuntimeError)):
        with complete_folder_or_nothing(out, force=False) as unfinished:
            (unfinished / "part").symlink_to(FULL)
            write(unfinished / "part")
    assert not list(tmp_path.iterdir())


def test_adapter_is_rejected(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="PEFT adapter"):
        load_config(str(tmp_path))
