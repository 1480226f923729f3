"""Target `pt2`: one torch.export archive with every method, the weights once, opened anywhere torch runs."""

from .target import Pt2Backend

backend = Pt2Backend()

__all__ = ["Pt2Backend", "backend"]
