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
    """The forward pass failed, or gave a vector that is not finite."""


class OutOfMemory(BackendError):
    """A batch needs more memory than the device has left; a smaller one may fit."""


class EngineStopped(EmberError):
    """The engine has ended: on request, or because its device can no longer be used."""


class DeviceLost(EngineStopped):
    """The device fails whatever it is asked (a sticky CUDA error); only a new process can use it again."""
