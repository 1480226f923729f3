"""Weight quantization before export, through torchao."""
