"""Inputs of methods other than text: encoder inputs, images, video and audio."""
