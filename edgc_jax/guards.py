"""Checks that turn silent waste, wrong results and hangs into errors."""
