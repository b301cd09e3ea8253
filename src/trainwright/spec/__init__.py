"""What is said: the nouns that plan, train, measure and present exchange. Frozen; each checks itself."""
