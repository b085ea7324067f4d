"""What `mmqa plan` does: compiles programs for devices that need not be there, and judges them."""
