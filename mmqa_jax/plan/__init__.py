"""`mmqa plan` compiles programs for devices that need not be there, and judges them."""
