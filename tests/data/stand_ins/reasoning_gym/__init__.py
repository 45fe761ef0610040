"""A stand-in for reasoning-gym, with the same interface and small sets. Tests put its folder on the path."""

from reasoning_gym.factory import DATASETS, create_dataset

__all__ = ["DATASETS", "create_dataset"]
