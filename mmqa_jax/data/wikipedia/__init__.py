"""Wikipedia as knowledge: the files in which it is published, read as a stream of sources."""
