"""The one exception type a user's mistake raises."""


class ConfigError(ValueError):
    """One or more settings that cannot be honoured; `violations` lists every one, each a full sentence."""

    def __init__(self, *violations):
        self.violations = tuple(violations)
        super().__init__("\n".join(self.violations))
