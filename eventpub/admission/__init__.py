"""Decides which events may be published now. Pure: no I/O; time and rows are arguments."""

from eventpub.admission.bulk import unknown
from eventpub.admission.decide import Plan
from eventpub.admission.model import Rules
from eventpub.admission.walk import failed_attempt

__all__ = ["Plan", "Rules", "failed_attempt", "unknown"]
