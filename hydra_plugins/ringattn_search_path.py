"""Makes ringattn's config groups available to other Hydra applications: `pattern=window` finds pattern/window.yaml."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RingattnSearchPath(SearchPathPlugin):
    """Appends the folder of ringattn's config groups; the application's own groups take precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        found = find_spec("ringattn")  # does not import it: this runs in every Hydra application of this environment
        if found is None or found.origin is None:
            return
        package = Path(found.origin).parent
        places = (package.parent / "conf", package / "conf")  # in a checkout, in a wheel
        folder = next((place for place in places if (place / "pattern" / "causal.yaml").is_file()), None)
        known = {entry.path.removeprefix("file://") for entry in search_path.get_path() if entry.path}
        if folder is not None and str(folder) not in known:
            search_path.append("ringattn", f"file://{folder}")
