"""The main job: a model goes in, a verified bundle comes out."""
