"""A topology from a file in any of its forms, told apart by what is in it."""

from __future__ import annotations

import json
from typing import Any

from ctxflow.installing import how_to_install_package
from ctxflow.topology.classad import parse_ads
from ctxflow.topology.condor import from_ads
from ctxflow.topology.graph import from_graph
from ctxflow.topology.model import Topology


def read_topologies(text: str, name: str) -> list[Topology]:
    """The topologies of all machines in a file.

    :param text: JSON of `ctxflow topo --json`, FlexTopo resources of Kubernetes as YAML or JSON (one, or a list), or
        machine ads of HTCondor (`condor_status -long` or `-json`).
    :param name: of the file, for messages.
    :raises ValueError: if it is none of these, or is wrong in itself, in one sentence.
    """
    try:
        data = _data(text)
        if data is None:
            return from_ads(parse_ads(text))
        items = data.get("items", [data]) if isinstance(data, dict) else data
        if not isinstance(items, list) or not items or not all(isinstance(each, dict) for each in items):
            raise ValueError("it holds no topology")
        if not any({"nodes", "spec"} & set(each) for each in items):
            return from_ads(items)
        return [from_graph(each) for each in items]
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _data(text: str) -> Any:
    """JSON's or YAML's data; None if it is neither."""
    if text.lstrip().startswith(("{", "[")):
        return json.loads(text)
    if not any(line.startswith("apiVersion:") for line in text.splitlines()):
        return None
    try:
        import yaml
    except ImportError:
        advice = how_to_install_package("PyYAML")
        raise ValueError(f"YAML needs PyYAML: {advice}, or give JSON (kubectl get -o json)") from None
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
