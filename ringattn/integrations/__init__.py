"""Run models of other libraries over sharded sequences."""

import re
from importlib.metadata import version

from ..errors import Unsupported

#: The newest tested minor release of each library; pyproject.toml has the oldest.
NEWEST = {"transformers": "5.24", "accelerate": "1.15", "trl": "1.16", "diffusers": "0.42", "peft": "0.21"}


def check_release(*libraries: str) -> None:
    """Raise Unsupported if an installed library is newer than its newest tested release."""
    for name in libraries:
        found, newest = version(name), NEWEST[name]
        if [*map(int, re.findall(r"\d+", found)[:2])] > [*map(int, newest.split("."))]:  # "6.0rc1" is a release, too
            raise Unsupported(
                f"{name} {found} is newer than {newest}, the newest release that ringattn was tested with; "
                f"pip install '{name}=={newest}.*', or a newer ringattn"
            )
