"""From logits to tokens to text: sampling, loops over steps, speculation."""
