"""TensorFlow's operations by what they do, as the names of their types."""

__all__ = ["ADDS", "ASSIGNS", "DRAWS"]

#: They change a variable by what they are given.
ADDS = frozenset(
    "AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterSub "
    "ResourceScatterUpdate".split()
)
#: They change a variable.
ASSIGNS = ADDS | {"AssignVariableOp"}
#: They draw other numbers each time they run.
DRAWS = frozenset(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
    "RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
    "StatefulUniformInt TruncatedNormal".split()
)
