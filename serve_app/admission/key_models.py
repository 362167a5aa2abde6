"""Restricts the server's models to those that an API key may use."""

from typing import Any

from serve_app.admission.accounts import calling
from serve_app.errors import UnknownModel, did_you_mean
from serve_app.models import Check, ServedModel, ServedModels, passes


class KeyModels:
    """The models of a backend that the current request's account may use. Same interface as `ServedModels`."""

    def __init__(self, backend: ServedModels) -> None:
        self._backend = backend
        self._names = {entry["id"]: {entry["id"], *entry.get("aliases", ())} for entry in backend.models()}
        self.check_health, self.backlog_s = backend.check_health, backend.backlog_s

    def get(self, name: str | None, check: Check | None = None) -> ServedModel:
        """As `ServedModels.get`, among the models of the key."""
        account = calling()
        if account is None or not account.limits.models:
            return self._backend.get(name, check)
        ids = self._ids(account.limits.models)
        if name is None:
            models = [self._backend.get(each) for each in ids]
            able = (each for each in models if check is not None and passes(check, each.info))
            if (model := next(able, models[0] if models else None)) is not None:
                return model
        else:
            try:
                model = self._backend.get(name, check)
                if model.info.served_model_name in ids:
                    return model
            except UnknownModel:
                pass  # the error's text would name models of other keys
        asked = "" if name is None else f"it may not use model `{name}`; "
        # A suggestion must not tell the names of other models.
        meant = "" if name is None else did_you_mean(name, (each for model in ids for each in self._names[model]))
        usable = ", ".join(ids) or "no model of this server"
        raise UnknownModel(f"the API key `{account.name}`: {asked}it may use {usable}{meant}")

    def models(self) -> list[dict[str, Any]]:
        """As `ServedModels.models`, of the models of the key."""
        return self._open(self._backend.models())

    def overview(self) -> list[dict[str, Any]]:
        """As `ServedModels.overview`, of the models of the key."""
        return self._open(self._backend.overview())

    def _open(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries of models that the key may use."""
        account = calling()
        if account is None or not account.limits.models:
            return entries
        ids = self._ids(account.limits.models)
        return [entry for entry in entries if entry["id"] in ids]

    def _ids(self, named: tuple[str, ...]) -> list[str]:
        """The models of the server that a key names, by name or alias."""
        return [each for each, names in self._names.items() if names.intersection(named)]
