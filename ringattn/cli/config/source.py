"""The YAML files that Hydra reads. Only the command line and ringattn's own files set Hydra, which can run code."""

from __future__ import annotations

import re
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from ...errors import InvalidInput
from .schema import conf_dir


class CheckedSource(FileConfigSource):
    """A folder of config files. Other files than ours cannot name callbacks or handlers, which would run."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The file. Raises InvalidInput where its path, its package, its keys or its defaults list name Hydra."""
        found = super().load_config(config_path)
        names = (config_path, found.header["package"], *found.config, getattr(found.config, "defaults", ""))
        if Path(self.path) != conf_dir() and re.search(r"(?<![\w-])hydra(?![\w-])", " ".join(map(str, names))):
            raise InvalidInput(
                f"{Path(self.path, config_path)}.yaml: a config file cannot set Hydra, which may run code; give "
                "what it sets on the command line, such as hydra.run.dir=/tmp/ringattn"
            )
        return found


def check_sources() -> None:
    """Have Hydra read every config file by `CheckedSource`."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = CheckedSource
