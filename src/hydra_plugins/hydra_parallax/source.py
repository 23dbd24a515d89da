"""`hydra.searchpath: ["parallax://"]`: the schema as `schema`, and any layout in words as an option of group `layout`.

It is: a source of configurations that are made, not read: `layout='tp2 pp2 zero1'` needs no file. It is not: the files
(`parallax.conf`).
"""

from __future__ import annotations

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

GROUP = "layout"


class ParallaxSource(ConfigSource):
    """The scheme "parallax://"."""

    @staticmethod
    def scheme() -> str:
        return "parallax"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") == GROUP

    def is_config(self, config_path: str) -> bool:
        path = config_path.removesuffix(".yaml")
        return path == "schema" or _fields(path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        from parallax.conf.reading import structured

        path = config_path.removesuffix(".yaml")
        config = structured() if path == "schema" else OmegaConf.create(_fields(path))
        return ConfigResult(provider=self.provider, path="parallax://", config=config, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []  # there is no end of layouts


def _fields(path: str) -> dict[str, object] | None:
    """What the layout at "layout/tp2 dp4" sets; None when that is no layout."""
    group, _, words = path.partition("/")
    if group != GROUP or not words:
        return None
    from parallax.strategies.layout import Layout

    try:
        given, default = Layout.parse(words).to_dict(), Layout().to_dict()
    except ValueError:
        return None
    return {name: value for name, value in given.items() if value != default[name]}
