"""Sites: where work can run, described by a model that a TOML file fills in."""

from ctxflow.sites.loader import load_site
from ctxflow.sites.site_model import Site
from ctxflow.sites.site_problems import SiteError

__all__ = ["Site", "SiteError", "load_site"]
