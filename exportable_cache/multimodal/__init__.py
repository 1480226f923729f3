"""Models that read images or sound: encoder and projector as methods, their tokens fed to the text decoder as embeddings."""

from .methods import multimodal_methods
from .modality import AUDIO, IMAGE, EmbedModule, FeaturesModule, Modality, modalities_of

__all__ = ["AUDIO", "IMAGE", "EmbedModule", "FeaturesModule", "Modality", "modalities_of", "multimodal_methods"]
