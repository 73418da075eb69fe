"""Generated Python of the private protocols."""
