"""Features that only some models need; each enters by an extension point of the engine."""

from composable.features.class_gathers import ClassGatheredBuffer
from composable.features.first_values import FirstValues, ParamInitFn, describe_buffers, move_buffers
from composable.features.graph_inputs import follow_inputs
from composable.features.whole_values import by_grid, collect_whole, spread_from, spread_whole
