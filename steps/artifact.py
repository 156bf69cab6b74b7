"""What passes from stage to stage; stored runs of flows name it here."""

from ptf.artifact import Artifact

__all__ = ["Artifact"]
