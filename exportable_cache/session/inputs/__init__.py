"""Stages that turn the prompts of a user into inputs of steps."""
