"""Prompts of the language models: templates, and how they become token ids."""
