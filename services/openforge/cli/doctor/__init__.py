"""Looks at a deployment as its services would, and says of each fault what to do about it.

Promises: it changes nothing but one small blob, and an object in a bucket of weights, which it removes; every check
ends, and says what it saw; a fault that hides others (no bus) is named once and what could not be looked at is said,
not guessed.
"""

from openforge.cli.doctor.deployment import Deployment
from openforge.cli.doctor.examine import examine
from openforge.cli.doctor.finding import Finding

__all__ = ["Deployment", "Finding", "examine"]
