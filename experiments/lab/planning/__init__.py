"""Layouts compiled without their devices, and clusters on paper."""
