"""What is kept between steps: layers, masks and attention over their slots."""
