"""What methods take beside text: encoders, images, sound."""
