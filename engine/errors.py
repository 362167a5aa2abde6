"""Everything that can go wrong with an input, a model folder or the device, as one small tree.

The tree says what happened. Which HTTP status and body that becomes stands in `serve_app/errors.py`.
"""


class EmberError(Exception):
    """Base of every error that emberforge raises on purpose. `str(error)` is meant for the user."""


class InvalidInput(EmberError):
    """One input breaks a limit or a rule of the model; nothing else is disturbed."""


class EmptyInput(EmberError):
    """One input holds nothing to compute."""


class TokenizerError(EmberError):
    """The tokenizer refused an input."""


class ModelError(EmberError):
    """A model folder cannot be served as its authors meant; raised while loading, never later."""


class BackendError(EmberError):
    """The forward pass failed, or gave what nobody can use."""


class NotFinite(BackendError):
    """The model gave an input a vector, a score or logits that are NaN or infinite."""

    def __init__(self, text: str = "the model gave a vector that is not finite") -> None:
        super().__init__(text)


class OutOfMemory(BackendError):
    """A batch needs more memory than the device has left; a smaller one may fit."""


class EngineStopped(EmberError):
    """The engine has ended: on request, or because its device can no longer be used."""


class DeviceLost(EngineStopped):
    """The device fails whatever it is asked (a sticky CUDA error); only a new process can use it again."""


class DeadlinePassed(EmberError):
    """The request's deadline came before its turn; nothing more of it is computed."""


class DeadlineOutOfReach(EmberError):
    """What waits already would keep the request beyond its deadline; nothing of it was queued."""

    def __init__(self, predicted_s: float, deadline_s: float) -> None:
        """Seconds from now: until it would be done, until it has to be."""
        super().__init__(predicted_s, deadline_s)
        self.predicted_s, self.deadline_s = predicted_s, deadline_s

    def __str__(self) -> str:
        return (
            f"would be done in about {self.predicted_s:.3g} s, {self.deadline_s:.3g} s are left; retry later or allow more time"
        )
