"""Sites: where work can run, described by a model that a TOML file fills in."""

from ctxflow.sites.model import Site, load_site

__all__ = ["Site", "load_site"]
