"""What entry points take beside text: encoders, images, sound."""
