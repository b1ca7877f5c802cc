"""What only some models need: gathers of a class, first values, inputs of graphs, values as a whole.

Annotations and faces call these files; the engine imports none of them.
"""

from composable.features.class_gathers import ClassGatheredBuffer
from composable.features.first_values import FirstValues, ParamInitFn, describe_buffers, move_buffers
from composable.features.graph_inputs import follow_inputs
from composable.features.whole_values import by_grid, collect_whole, spread_from, spread_whole
