"""From the parameter table to nnx parameters: shapes only, values come with the state."""
import jax
import jax.numpy as jnp
from flax import nnx


def declare(table, name):
    """`nnx.Param` of table entry `name`, carrying its name and labels; table: {name: params.Parameter}."""
    parameter = table[name]
    return nnx.Param(jax.ShapeDtypeStruct(parameter.shape, jnp.float32), path=name, labels=parameter.labels)


def is_parameter(node):
    return isinstance(node, nnx.Variable)


def fill(module, values):
    """A copy of `module` whose parameters hold values[name] (arrays, or any pytree per parameter); those without a value keep their shapes."""
    structure, state = nnx.split(module)
    given = lambda variable: values.get(variable.get_metadata("path"), variable.get_value())
    filled = jax.tree.map(lambda variable: variable.replace(given(variable)), state, is_leaf=is_parameter)
    return nnx.merge(structure, filled)


def weights_of(module):
    """[(name, value)] of a module's parameters."""
    return [(variable.get_metadata("path"), variable.get_value()) for variable in jax.tree.leaves(nnx.state(module), is_leaf=is_parameter)]
