"""The publish stage: make the publish checks, then publish the model as a version (ptf.publish.publishing)."""

from ptf.config import Job
from steps.artifact import Artifact


def publish(job: Job, artifact: Artifact) -> Artifact:
    """Publish the artifact's model under the name of its run, and add its address to the artifact. Raises the
    errors of `ptf.publish.publishing.publish`."""
    from ptf.publish.publishing import publish as publish_version

    return publish_version(job, artifact)


def page(artifact: Artifact) -> str:
    """Return Markdown for the card of the step: the publish checks that were passed, and the model card."""
    from ptf.publish.model_card import page as version_page

    return version_page(artifact)
