"""`mmqa serve`: a page and OpenAI's API over models that stay loaded."""
