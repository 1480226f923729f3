"""Pytree and FX registrations, of our own classes and of transformers' caches."""

from .registry import Action, Registration, is_ours, owner_of, register_node, unregister_node

__all__ = ["Action", "Registration", "is_ours", "owner_of", "register_node", "unregister_node"]
