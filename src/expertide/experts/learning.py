"""From the requests of one run to the profile that the next one starts from."""

from __future__ import annotations

from expertide._native import Residency
from expertide.experts import popularity
from expertide.experts.popularity import Profile
from expertide.formats.tensors import ExpertCatalog, ModelFiles


class Learning:
    """Reads the saved profile when made; `save` adds what this run has asked for."""

    def __init__(self, files: ModelFiles, catalog: ExpertCatalog, residency: Residency) -> None:
        self._catalog = catalog
        self._residency = residency
        self._name: str | None = None
        self.saved: Profile | None = None
        try:
            self._name = popularity.fingerprint(files)
        except OSError:  # whoever needs the file will say so
            return
        self.saved = popularity.load(self._name, catalog)

    def save(self) -> None:
        """Keep what was learnt, when it is worth it. Requests counted once are not counted again by a second call."""
        name, self._name = self._name, None
        new = self._counted()
        if name is None or new.tokens < popularity.MIN_TOKENS:
            return
        # Another process may have saved meanwhile; what it learnt is kept, but for the moment between these two lines.
        saved = popularity.load(name, self._catalog)
        popularity.save(name, new if saved is None else saved + new)

    def _counted(self) -> Profile:
        counts = self._residency.decode_requests
        layers = {layer_id: counts[layer_id].astype("float64") for layer_id in self._catalog.layers}
        # One step per layer and token.
        return Profile(self._residency.decode_steps / max(len(layers), 1), layers)
