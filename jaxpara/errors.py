"""The exception types: a mistake in the settings, and a run that cannot go on."""


class ConfigError(ValueError):
    """One or more settings that cannot be honoured; `violations` lists every one, each a full sentence."""

    def __init__(self, *violations):
        self.violations = tuple(violations)
        super().__init__("\n".join(self.violations))


class TrainingStopped(RuntimeError):
    """A loss or gradient that is not finite ended a run; neither that step nor a later one updated anything.

    step: from 1. row: the first row of the batch at fault. parameter: dotted path of the first parameter whose gradient is not finite.
    """

    def __init__(self, message, step, row, parameter):
        self.step, self.row, self.parameter = step, row, parameter
        super().__init__(message)
