"""Write this package's metrics as Spaces for `evaluate.load("owner/name")`.

A Space contains the metric module, its requirements, and the demo page of the `evaluate` library.
"""

import shutil
from pathlib import Path

from .._version import __version__


HERE = Path(__file__).parent
METRICS = sorted(folder.name for folder in HERE.iterdir() if (folder / f"{folder.name}.py").is_file())
EXTRAS = {"go_code": "[go]"}

CARD = """---
title: {title}
sdk: gradio
app_file: app.py
pinned: false
license: apache-2.0
tags:
- evaluate
- metric
---

# {title}

{text}

```python
import evaluate

metric = evaluate.load("{name}")  # this folder
print(metric.inputs_description)
```

Needs `hrm_hf{extra}` {version} or newer.
"""

APP = """import evaluate
from evaluate.utils import launch_gradio_widget


launch_gradio_widget(evaluate.load("./{name}.py"))
"""


def write_metric_space(name: str, folder: str | Path) -> Path:
    """Write the folder of a metric's Space. Upload it with `hrm-hf push --space FOLDER OWNER/{name}`.

    Raises:
        ValueError: unknown metric.
        FileExistsError: `folder` is not empty.
    """
    if name not in METRICS:
        raise ValueError(f"name={name!r}: unknown metric; must be one of {', '.join(METRICS)}")
    folder, source = Path(folder), HERE / name / f"{name}.py"
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder={str(folder)!r}: not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder)
    text, extra = source.read_text().split('"""')[1].strip(), EXTRAS.get(name, "")
    title = name.replace("_", " ").capitalize()
    fields = {"title": title, "name": name, "text": text, "extra": extra, "version": __version__}
    (folder / "README.md").write_text(CARD.format(**fields))
    (folder / "requirements.txt").write_text(f"hrm_hf{extra}>={__version__}\nevaluate\ngradio\n")
    (folder / "app.py").write_text(APP.format(name=name))
    return folder
