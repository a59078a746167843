"""Import and start Ray, which is an optional package."""

import os
from importlib import import_module
from typing import Any

from recsys.errors import ConfigError

OBJECT_STORE_BYTES = 128 << 20  # replies are small; models are not in the object store


def import_ray() -> Any:
    """Import `ray` with its part `serve`.

    Raises:
        ConfigError: Ray is not installed.
    """
    # this turns off usage reports to its makers, and must be set before the import
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import_module("ray.serve")
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"engine 'ray' needs Ray ({error.name} is missing): pip install 'recbeam[ray]'"
        ) from error


def start_ray(ray: Any, **options: Any) -> None:
    """Join the cluster of `RAY_ADDRESS`, or start one on this machine that ends with us."""
    if "RAY_ADDRESS" not in os.environ:
        options = {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            **options,
        }
    ray.init(logging_level="warning", log_to_driver=False, **options)
