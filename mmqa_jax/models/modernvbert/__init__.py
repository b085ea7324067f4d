"""ModernVBERT: a ModernBERT that reads the tokens of a SigLIP's tiles among those of a text."""
