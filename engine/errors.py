"""The engine's errors: faults of an input, of a model folder or of the device.

`serve_app/errors.py` has their HTTP statuses and bodies.
"""


class EmberError(Exception):
    """Base of every error that emberforge raises on purpose. `str(error)` is meant for the user."""


class InvalidInput(EmberError):
    """An input breaks a limit or a rule of the model. Other inputs are not affected."""


class EmptyInput(EmberError):
    """An input contains nothing to compute."""


class TokenizerError(EmberError):
    """The tokenizer refused an input."""


class ModelError(EmberError):
    """A model folder cannot be served as its authors intended. Raised only during the load."""


class BackendError(EmberError):
    """The forward pass failed, or its result is unusable."""


class NotFinite(BackendError):
    """The vector, the score or the logits of an input are NaN or infinite."""

    def __init__(self, text: str = "the model gave a vector that is not finite") -> None:
        super().__init__(text)


class OutOfMemory(BackendError):
    """A batch needs more memory than the device has left; a smaller one may fit."""


class EngineStopped(EmberError):
    """The engine has ended: on request, or because its device can no longer be used."""


class DeviceLost(EngineStopped):
    """The device fails at every call (a sticky CUDA error), or the process of another stage is lost. Only a new process can
    compute again."""


class DeadlinePassed(EmberError):
    """The request's deadline came before its turn. The rest of the request is not computed."""


class DeadlineOutOfReach(EmberError):
    """The queue is so long that the request would miss its deadline. The request was not queued."""

    def __init__(self, predicted_s: float, deadline_s: float) -> None:
        """Seconds from now until the predicted end of the request, and until its deadline."""
        super().__init__(predicted_s, deadline_s)
        self.predicted_s, self.deadline_s = predicted_s, deadline_s

    def __str__(self) -> str:
        return (
            f"would be done in about {self.predicted_s:.3g} s, {self.deadline_s:.3g} s are left; retry later or allow more time"
        )
