"""Apple's Core AI, which runs on Macs, iPhones and Linux."""
