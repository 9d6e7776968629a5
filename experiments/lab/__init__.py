"""This project's laboratory: studies, peers, networks, plans and pages.

The trainer knows the methods of others wherever a part of the laboratory is
imported.
"""

from experiments.lab import peers as peers
