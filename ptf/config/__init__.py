"""Configs: one typed tree (`schema`), read from YAML (`load`). No torch. Only here, and in the
recipes' own keys, pydantic is used."""

from ptf.config.load import (
    dump,
    fingerprint,
    frozen_differences,
    load,
    loads,
    model_paths,
    raise_if_fixed_keys_changed,
    resolve,
    shown,
    sources_of,
)
from ptf.config.schema import Job
from ptf.config.section import Plugin
from ptf.config.tree import ConfigError

__all__ = [
    "ConfigError",
    "Job",
    "Plugin",
    "dump",
    "fingerprint",
    "frozen_differences",
    "load",
    "loads",
    "model_paths",
    "raise_if_fixed_keys_changed",
    "resolve",
    "shown",
    "sources_of",
]
