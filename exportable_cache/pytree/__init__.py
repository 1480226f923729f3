"""Pytree and FX registrations, of our own classes and of transformers' caches."""

from .registry import Action, Registration, is_ours, owner_of, register_node, unregister_node
from .transformers_caches import cache_classes, register_cache_class, register_transformers_caches

__all__ = [
    "Action",
    "Registration",
    "cache_classes",
    "is_ours",
    "owner_of",
    "register_cache_class",
    "register_node",
    "register_transformers_caches",
    "unregister_node",
]
