"""The errors that cross rooms. Each has a stable ``code`` and says what happened, to what, and what to do."""


class OmniError(Exception):
    """Base of every error this package raises on purpose.

    ``code`` is stable across releases: scripts and dashboards may match on it.
    """

    code = "OMNI"


class InvalidRequest(OmniError):
    """The caller's input is wrong. A stage may raise it; the HTTP server answers 400.

    ``param`` names the offending request field where there is one.
    """

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFinite(OmniError):
    """A part of the model made infinities or what is no number. Its request fails for that, and is not to blame."""

    code = "not_finite"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} not all finite: the model's weights may be damaged")


class PayloadError(OmniError):
    """A payload holds a value that no transport can carry; names the stage and the key."""

    code = "payload_type"


class PipelineError(OmniError):
    """A request failed inside the pipeline. ``stage`` and ``instance`` say where."""

    code = "pipeline"

    def __init__(self, message: str, *, stage: str | None = None, instance: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.instance = instance


class StageFailed(PipelineError):
    """A stage raised while it worked on this request; the server goes on."""

    code = "stage_failed"


class ProcessExited(PipelineError):
    """The OS process that held this request died; the message names its exit status."""

    code = "process_exited"


class DeadlineExceeded(PipelineError):
    """The request did not finish within its time limit and was aborted everywhere."""

    code = "deadline_exceeded"


class RequestAborted(PipelineError):
    """The request was aborted by its caller or by the server's shutdown."""

    code = "request_aborted"


class Overloaded(OmniError):
    """The server is full. ``retry_after`` is the suggested wait in seconds (HTTP 503)."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StartupError(OmniError):
    """The server could not start; the message names the process or stage and holds its last log lines."""

    code = "startup"


class WeightShareError(OmniError):
    """Replicas cannot share weights as planned. Names the group or the tensor and says what to do."""

    code = "weight_share"


class LaunchRefused(OmniError):
    """Several servers on one GPU cannot be started as asked. Lists everything that is wrong; nothing was started."""

    code = "launch_refused"


class LaunchFailed(OmniError):
    """A run of several servers on one GPU did not start, is not as recorded, or was not ended. Names the replica."""

    code = "launch_failed"
