"""Where this verifier runs, and how much it does at once."""

from pathlib import Path

from openforge.sandbox.choice import DriverSettings


class Settings(DriverSettings, frozen=True, kw_only=True):
    """`run` `*` verifies the attempts of every run.

    `verifier_slots`: attempts verified at once; each costs a box and its memory. `verifier_attempts`: how
    often one is tried before it counts as failed for want of a verifier. `verifier_name` is written
    into every trajectory.
    """

    run: str = "*"
    home: Path = Path("runs")
    verifier_slots: int = 8
    verifier_attempts: int = 5
    verifier_name: str = "verifier"
