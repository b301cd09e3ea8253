"""trainwright plans, runs and checks large-scale LLM training: one vocabulary, one run file, three verbs."""

__version__ = "0.1.0"
