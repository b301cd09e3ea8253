"""What is predicted: memory, time and the best layout, as pure functions of nouns. Deterministic to the byte."""
